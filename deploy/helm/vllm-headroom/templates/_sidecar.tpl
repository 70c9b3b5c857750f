{{/*
Entries for your pod's initContainers: the same containers as deploy/kubernetes/components/sidecar and, with sidecar.probe,
deploy/kubernetes/components/probe.
Its context is this chart's: (index .Subcharts "vllm-headroom") in the chart that depends on it.
*/}}
{{- define "vllm-headroom.sidecar" -}}
{{- with .Values.sidecar -}}
{{- $env := .env | default dict -}}
{{- if .probe -}}
- name: headroom-probe
  {{- include "vllm-headroom.image" $ | nindent 2 }}
  command: [sh, -c, "vllm-headroom probe install /opt/headroom-probe || true"]
  resources:
    {{- toYaml .resources | nindent 4 }}
  {{- include "vllm-headroom.security" (dict "anyUser" .anyUser) | nindent 2 }}
  volumeMounts:
  - {name: headroom-probe, mountPath: /opt/headroom-probe}
  - {name: headroom-no-token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{ end -}}
- name: headroom
  {{- include "vllm-headroom.image" $ | nindent 2 }}
  restartPolicy: Always
  env:
  - {name: HEADROOM_STATE_DIR, value: /var/lib/vllm-headroom}
  - {name: HEADROOM_ROLE, valueFrom: {fieldRef: {fieldPath: "metadata.labels['vllm-headroom/role']"}}}
  - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
  - {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
  {{- if and .memoryLimitOf (ne .memoryLimitOf "vllm") (not (hasKey $env "HEADROOM_ENGINE_CONTAINER")) }}
  - {name: HEADROOM_ENGINE_CONTAINER, value: {{ .memoryLimitOf | quote }}}
  {{- end }}
  {{- if .probe }}
  - {name: HEADROOM_PROBE_DIR, value: /run/headroom-probe}
  {{- end }}
  {{- if eq .gpu "runtime-class" }}
  - {name: NVIDIA_VISIBLE_DEVICES, value: all}
  - {name: NVIDIA_DRIVER_CAPABILITIES, value: utility}
  {{- else if and (eq .gpu "dra") (not (hasKey $env "HEADROOM_GPUS")) }}
  - {name: HEADROOM_GPUS, value: all}
  {{- end }}
  {{- if and .memoryLimitOf (not (hasKey $env "HEADROOM_HOST_MEMORY_LIMIT_BYTES")) }}
  - name: HEADROOM_HOST_MEMORY_LIMIT_BYTES
    valueFrom: {resourceFieldRef: {containerName: {{ .memoryLimitOf | quote }}, resource: limits.memory, divisor: "1"}}
  {{- end }}
  {{- with include "vllm-headroom.runbooks" $ }}
  - {name: HEADROOM_RUNBOOKS_URL, value: {{ . | quote }}}
  {{- end }}
  {{- if include "vllm-headroom.evicts" $ }}
  - {name: HEADROOM_EVICT, value: {{ .evict | quote }}}
  {{- end }}
  {{- if and .engineLog (not (hasKey $env "HEADROOM_ENGINE_LOG")) }}
  - {name: HEADROOM_ENGINE_LOG, value: kubernetes}
  {{- end }}
  {{- range $name, $value := $env }}
  - {name: {{ $name }}, value: {{ $value | quote }}}
  {{- end }}
  ports:
  - {name: headroom, containerPort: 9839}
  livenessProbe:
    {{- if get $env "HEADROOM_WEB_CONFIG_FILE" }}
    tcpSocket: {port: headroom} # a kubelet has no certificate and no password for /healthz
    {{- else }}
    httpGet: {path: /healthz, port: headroom}
    {{- end }}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
    terminationGracePeriodSeconds: 10
  {{- $claims := eq .gpu "dra" | ternary (dict "claims" (list (dict "name" "gpu"))) dict }}
  resources:
    {{- toYaml (merge $claims (.resources | default dict)) | nindent 4 }}
  {{- include "vllm-headroom.security" (dict "root" (eq .gpu "amd") "anyUser" .anyUser) | nindent 2 }}
  terminationMessagePolicy: FallbackToLogsOnError
  volumeMounts:
  - {name: headroom-state, mountPath: /var/lib/vllm-headroom}
  - {name: headroom-{{ if include "vllm-headroom.calls-api" $ }}api{{ else }}no-token{{ end }}, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
  {{- if .probe }}
  - {name: headroom-probe-files, mountPath: /run/headroom-probe}
  {{- end }}
  {{- with .extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* Entries for your pod's volumes. */}}
{{- define "vllm-headroom.volumes" -}}
{{- with .Values.sidecar.stateClaim -}}
- {name: headroom-state, persistentVolumeClaim: {claimName: {{ . | quote }}}}
{{- else -}}
- {name: headroom-state, emptyDir: {medium: Memory, sizeLimit: 16Mi}}
{{- end }}
- {name: headroom-no-token, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
{{- if include "vllm-headroom.calls-api" . }}
- name: headroom-api
  projected:
    sources:
    - serviceAccountToken: {path: token, expirationSeconds: 3600}
    - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
    - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
{{- end }}
{{- if .Values.sidecar.probe }}
- {name: headroom-probe, emptyDir: {medium: Memory, sizeLimit: 4Mi}}
- {name: headroom-probe-files, emptyDir: {medium: Memory, sizeLimit: 32Mi}}
{{- end }}
{{- with .Values.sidecar.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* With sidecar.probe, two entries for the env of vLLM's container; one that has a PYTHONPATH has to name both. */}}
{{- define "vllm-headroom.probe-env" -}}
{{- if .Values.sidecar.probe -}}
- {name: PYTHONPATH, value: /opt/headroom-probe}
- {name: HEADROOM_PROBE_DIR, value: /run/headroom-probe}
{{- end -}}
{{- end -}}

{{/* With sidecar.probe, two entries for the volumeMounts of vLLM's container. */}}
{{- define "vllm-headroom.probe-mounts" -}}
{{- if .Values.sidecar.probe -}}
- {name: headroom-probe, mountPath: /opt/headroom-probe, readOnly: true}
- {name: headroom-probe-files, mountPath: /run/headroom-probe}
{{- end -}}
{{- end -}}

{{/* Where each runbook is, with {alert} for the alert's name; nothing where that is not known. */}}
{{- define "vllm-headroom.runbooks" -}}
{{- with .Values.addresses.runbooks -}}
{{ contains "{alert}" . | ternary . (print (trimSuffix "/" .) "/{alert}") }}
{{- end -}}
{{- end -}}

{{/* Whether the sidecar may ask for evictions: nothing where it may not, also without a value. */}}
{{- define "vllm-headroom.evicts" -}}
{{ if ne (.Values.sidecar.evict | default "off") "off" }}true{{ end }}
{{- end -}}

{{/* Whether the one sidecar of a node may ask for evictions. */}}
{{- define "vllm-headroom.node-evicts" -}}
{{ if ne (.Values.node.evict | default "off") "off" }}true{{ end }}
{{- end -}}

{{/* Whether the sidecar has a token for the API server: for evictions, or for the log of vLLM's container. */}}
{{- define "vllm-headroom.calls-api" -}}
{{ if or (include "vllm-headroom.evicts" .) .Values.sidecar.engineLog }}true{{ end }}
{{- end -}}

{{/* What the objects of a release are called: never as those of another release in the namespace. */}}
{{- define "vllm-headroom.name" -}}
{{ .Release.Name }}-headroom
{{- end -}}

{{/* Labels of your pods, by which the objects of their release select them. */}}
{{- define "vllm-headroom.labels" -}}
vllm-headroom: enabled
vllm-headroom/release: {{ .Release.Name | quote }}
{{- end -}}

{{/* The pods of this release; installed by itself, those that no other release has. */}}
{{- define "vllm-headroom.selector" -}}
matchLabels:
{{- if and .Chart.IsRoot (ne .Values.mode "node") }}
  vllm-headroom: enabled
matchExpressions:
- {key: vllm-headroom/release, operator: DoesNotExist}
{{- else }}
  {{- include "vllm-headroom.labels" . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "vllm-headroom.image" -}}
{{- with .Values.sidecar.image -}}
image: "{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}"
imagePullPolicy: {{ .pullPolicy }}
{{- end -}}
{{- end -}}

{{/*
Its context has `root`, whether the container has to see what other users' processes have open (AMD's driver lists no processes),
and `anyUser`, whether the cluster chooses the user.
*/}}
{{- define "vllm-headroom.security" -}}
securityContext:
  runAsNonRoot: {{ not .root }}
  {{- if or .root (not .anyUser) }}
  runAsUser: {{ if .root }}0{{ else }}65532{{ end }}
  runAsGroup: {{ if .root }}0{{ else }}65532{{ end }}
  {{- end }}
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]{{ if .root }}, add: [SYS_PTRACE]{{ end }}}
  seccompProfile: {type: RuntimeDefault}
{{- end -}}
