{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "headrace.metadata" -}}
name: {{ .Release.Name }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "headrace.labels" . | nindent 2 }}
{{- end }}

{{/* Seconds for a pull, and again for a load: start_timeout_s of the configuration, whose 0 is a day here. */}}
{{- define "headrace.startSeconds" -}}
{{- $given := .Values.config.start_timeout_s -}}
{{- if kindIs "invalid" $given }}1800{{ else if eq (float64 $given) 0.0 }}86400{{ else }}{{ ceil $given | int64 }}{{ end }}
{{- end }}

{{/* A pod that is gone has to be loaded again, which takes minutes. */}}
{{- define "headrace.scalingBehavior" -}}
scaleDown:
  stabilizationWindowSeconds: 600
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end }}

{{/* Keys of the configuration with hosts outside the pod: loopback and Unix sockets are inside. */}}
{{- define "headrace.remoteKeys" -}}
{{- $config := .Values.config }}
{{- $hosts := dict "gateway.store.url" ($config.gateway.store).url "gateway.otlp_traces_endpoint" $config.gateway.otlp_traces_endpoint }}
{{- $_ := set $hosts "usage.kafka.brokers" (($config.usage).kafka).brokers }}
{{- $_ := set $hosts "usage.clickhouse.url" (($config.usage).clickhouse).url }}
{{- range $i, $model := $config.models }}
{{- range $j, $upstream := $model.upstreams }}
{{- $_ := set $hosts (printf "models[%d].upstreams[%d].url" $i $j) $upstream.url }}
{{- end }}
{{- range $j, $replica := ($model.remote).replicas }}
{{- $_ := set $hosts (printf "models[%d].remote.replicas[%d].address" $i $j) $replica.address }}
{{- end }}
{{- $_ := set $hosts (printf "models[%d]" $i) (regexFindAll "\"(s3|gs)://[^\"]*" (toJson $model) 1) }}
{{- end }}
{{- $found := list }}
{{- range $key := keys $hosts | sortAlpha }}
{{- range $host := toStrings (index $hosts $key) | compact }}
{{- if not (regexMatch "^(unix:|(https?://|rediss?://)?([^@/]*@)?(localhost|127\\.[0-9.]+|\\[::1\\])(:[0-9]+)?(/|$))" $host) }}
{{- $found = append $found $key }}
{{- end }}
{{- end }}
{{- end }}
{{- uniq $found | join ", " }}
{{- end }}

{{- define "headrace.check" -}}
{{- $v := .Values }}
{{- if $v.config.gateway.tls }}
{{- fail "config.gateway.tls: this chart's probes and scrapes speak http. End TLS in a Gateway or an Ingress." }}
{{- end }}
{{- if and $v.state.claim (or (ne $v.autoscaling.kind "none") (gt (int $v.replicaCount) 1)) }}
{{- fail "state.claim: a state folder is one pod's. For several pods set config.gateway.store.url and leave state.claim empty." }}
{{- end }}
{{- $remote := include "headrace.remoteKeys" . | trim }}
{{- if and $v.networkPolicy.enabled (not $v.networkPolicy.egress) $remote }}
{{- printf "networkPolicy.egress: is empty, and config has other hosts in %s. Write rules for them, or set networkPolicy.enabled to false." $remote | fail }}
{{- end }}
{{- $readers := or $v.serviceMonitor.enabled $v.inferencePool.enabled }}
{{- if and $readers (not (has $v.config.gateway.open_metrics (list "totals" "all"))) }}
{{- fail "config.gateway.open_metrics: is neither totals nor all, and serviceMonitor and inferencePool read /metrics without a key." }}
{{- end }}
{{- $first := first $v.config.models | default dict }}
{{- if and $v.inferencePool.enabled (or (ne (len $v.config.models) 1) (ne (int ($first.replicas | default 1)) 1) (not $first.engine)) }}
{{- fail "inferencePool: a picker reads one engine's gauges of a pod. config.models must have one model with one replica and no remote." }}
{{- end }}
{{- end }}
