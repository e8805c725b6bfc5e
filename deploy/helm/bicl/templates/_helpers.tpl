{{- define "bicl.name" -}}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{- end }}
{{- define "bicl.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "bicl.labels" -}}
{{ include "bicl.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: {{ .Values.door }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
{{- define "bicl.port" -}}{{ if eq .Values.door "tgi" }}80{{ else }}8080{{ end }}{{- end }}
{{- define "bicl.secret" -}}{{ .Values.existingSecret | default (printf "%s-token" (include "bicl.name" .)) }}{{- end }}
{{- /* Ports of the shards' counters, as JSON: {"ports": [...]}. */ -}}
{{- define "bicl.shardPorts" -}}
{{- $ports := list }}
{{- if and (eq .Values.door "tgi") .Values.metricsPort }}
{{- range $rank := until (int .Values.gpus) }}{{ $ports = append $ports (add $.Values.metricsPort $rank) }}{{ end }}
{{- end }}
{{- dict "ports" $ports | toJson }}
{{- end }}
{{- define "bicl.check" -}}
{{- if not (has .Values.door (list "tgi" "embedded")) }}{{ fail (printf "door is %q; use tgi or embedded" .Values.door) }}{{ end }}
{{- if and (eq .Values.door "tgi") (lt (int .Values.gpus) 1) }}{{ fail "door tgi needs gpus >= 1; use door embedded on a CPU" }}{{ end }}
{{- end }}
