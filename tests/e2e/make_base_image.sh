#!/bin/sh
# usage: make_base_image.sh TAG - a slim Debian with Python as a Docker image, from Debian's packages
# alone: what the official python image is where a registry can be reached. The machine's own
# certificates and pip settings go in, so that the build reaches what this machine reaches.
set -eu
tag=$1
docker image inspect "$tag" >/dev/null 2>&1 && exit 0
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" >/dev/null
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/doc "$root"/usr/share/man "$root"/usr/share/locale
tar -C "$root" -c . | docker import - "$tag" >/dev/null
