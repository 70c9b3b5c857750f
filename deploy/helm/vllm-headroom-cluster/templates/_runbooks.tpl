{{/* Where each runbook is, with {alert} for the alert's name; nothing where that is not known. */}}
{{- define "vllm-headroom-cluster.runbooks" -}}
{{- with .Values.addresses.runbooks -}}
{{ contains "{alert}" . | ternary . (print (trimSuffix "/" .) "/{alert}") }}
{{- end -}}
{{- end -}}
