{{/*
One entry for your pod's initContainers: the same container as deploy/kubernetes/components/sidecar.
Its context is this chart's: (index .Subcharts "vllm-headroom") in the chart that depends on it.
*/}}
{{- define "vllm-headroom.sidecar" -}}
{{- with .Values.sidecar -}}
- name: headroom
  image: {{ .image.repository }}{{ if .image.digest }}@{{ .image.digest }}{{ else }}:{{ .image.tag | default $.Chart.AppVersion }}{{ end }}
  imagePullPolicy: {{ .image.pullPolicy }}
  restartPolicy: Always
  env:
  - {name: HEADROOM_STATE_DIR, value: /var/lib/vllm-headroom}
  {{- if eq .gpu "runtime-class" }}
  - {name: NVIDIA_VISIBLE_DEVICES, value: all}
  - {name: NVIDIA_DRIVER_CAPABILITIES, value: utility}
  {{- else if eq .gpu "dra" }}
  - {name: HEADROOM_GPUS, value: all}
  {{- end }}
  {{- range $name, $value := .env }}
  - {name: {{ $name }}, value: {{ $value | quote }}}
  {{- end }}
  ports:
  - {name: headroom, containerPort: 9839}
  livenessProbe:
    httpGet: {path: /healthz, port: headroom}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  resources:
    {{- toYaml .resources | nindent 4 }}
    {{- if eq .gpu "dra" }}
    claims: [{name: gpu}]
    {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]}
    seccompProfile: {type: RuntimeDefault}
  terminationMessagePolicy: FallbackToLogsOnError
  volumeMounts:
  - {name: headroom-state, mountPath: /var/lib/vllm-headroom}
  - {name: headroom-no-token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end -}}
{{- end -}}

{{/* Two entries for your pod's volumes. */}}
{{- define "vllm-headroom.volumes" -}}
- {name: headroom-state, emptyDir: {medium: Memory, sizeLimit: 16Mi}}
- {name: headroom-no-token, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
{{- end -}}
