"""Page bookkeeping: layout arithmetic, allocation, prefix index. CPU only, no kernels."""
