{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
{{ include "headrace.chartLabels" . }}
{{- end }}

{{- define "headrace.chartLabels" -}}
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

{{/* What engines' pods are: another name, so that nothing that selects gateways selects them. */}}
{{- define "headrace.engines.selector" -}}
app.kubernetes.io/name: headrace-engine
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "headrace.engines.metadata" -}}
name: {{ .Release.Name }}-engines
namespace: {{ .Release.Namespace }}
labels:
  {{- include "headrace.engines.selector" . | nindent 2 }}
  {{- include "headrace.chartLabels" . | nindent 2 }}
{{- end }}

{{/* Not empty where a model is divided over several pods. */}}
{{- define "headrace.hasStages" -}}
{{- if gt (int .Values.engines.stages) 1 }}yes{{ end }}
{{- end }}

{{/* What has the engines' pods. */}}
{{- define "headrace.engines.workload" -}}
{{ if include "headrace.hasStages" . }}leaderworkersets{{ else }}statefulsets{{ end }}/{{ .Release.Name }}-engines
{{- end }}

{{/*
An engine's pod.
serves: gateways reach it, as they do rank 0 of several
rendezvous: where rank 0 of several listens for the others; not given: there is one rank
*/}}
{{- define "headrace.engines.template" -}}
{{- $root := .root }}
{{- with $root.Values.engines -}}
metadata:
  labels:
    {{- include "headrace.engines.selector" $root | nindent 4 }}
    {{- include "headrace.chartLabels" $root | nindent 4 }}
spec:
  automountServiceAccountToken: false
  {{- include "headrace.pod" $root | nindent 2 }}
  containers:
    - name: engine
      image: {{ include "headrace.image" $root }}
      args:
        - engine
        - {{ .model | quote }}
        - --listen={{ ternary "0.0.0.0" "$(POD_IP)" $.serves }}:7001
        - --tls-dir=/run/secrets/headrace-engines
        - --name=$(POD_NAME)
        - --drain-timeout={{ $root.Values.config.drain_timeout_s }}
        {{- if $.rendezvous }}
        - --pipeline-parallel-size={{ .stages | int64 }}
        - --rank=$(LWS_WORKER_INDEX)
        - --rendezvous={{ $.rendezvous }}:7100
        - --tls-name={{ $root.Release.Name }}-engines.{{ $root.Release.Namespace }}.svc
        {{- end }}
        {{- range .args }}
        - {{ . | quote }}
        {{- end }}
      env:
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        {{- if $.rendezvous }}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- end }}
        {{- include "headrace.cacheVariables" $root | nindent 8 }}
      {{- with .env }}
      envFrom:
        - secretRef: {name: {{ . }}}
      {{- end }}
      ports:
        - {name: engine, containerPort: 7001}
        {{- if $.rendezvous }}
        - {name: ranks, containerPort: 7100}
        {{- end }}
      {{- if $.serves }}
      # The port is open once the engine serves, after a pull and a load. A process whose engine dies ends by itself.
      startupProbe:
        tcpSocket: {port: engine}
        periodSeconds: 5
        failureThreshold: {{ div (add (mul 2 (include "headrace.startSeconds" $root | int64)) 4) 5 }}
      readinessProbe:
        tcpSocket: {port: engine}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 2
      {{- include "headrace.preStop" $root | nindent 6 }}
      {{- end }}
      {{- include "headrace.container" $root | nindent 6 }}
      resources:
        {{- toYaml .resources | nindent 8 }}
      volumeMounts:
        {{- include "headrace.mounts" $root | nindent 8 }}
  volumes:
    {{- include "headrace.volumes" (dict "root" $root "tls" .tls.engine) | nindent 4 }}
  {{- include "headrace.placement" . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Not empty where a model names them as the workload that Headrace may scale. */}}
{{- define "headrace.scalesEngines" -}}
{{- range .Values.config.models }}
{{- if eq ((((.remote).kubernetes).workload) | default "") (include "headrace.engines.workload" $) }}yes{{ end }}
{{- end }}
{{- end }}

{{- define "headrace.autoscalesEngines" -}}
{{- if include "headrace.scalesEngines" . }}
{{- range .Values.config.models }}
{{- if and (.remote).kubernetes .autoscale }}yes{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "headrace.image" -}}
"{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
{{- end }}

{{/* The preStop sleep, the drain, and what a supervisor takes after it. */}}
{{- define "headrace.pod" -}}
serviceAccountName: {{ .Release.Name }}
# A Service's variables would begin with HEADRACE_, as the configuration's do.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add (.Values.config.drain_timeout_s | ceil | int64) 30 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  # Always would open the private folders of a claim to the group at each start, and Headrace refuses them then.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "headrace.preStop" -}}
lifecycle:
  preStop:
    sleep: {seconds: 5}       # until no endpoint leads here: from SIGTERM on, new requests are refused
{{- end }}

{{- define "headrace.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "headrace.cacheVariables" -}}
- {name: HEADRACE_CACHE_DIR, value: /var/cache/headrace/files}
- {name: TRITON_CACHE_DIR, value: /var/cache/headrace/triton}
{{- end }}

{{- define "headrace.mounts" -}}
- {name: cache, mountPath: /var/cache/headrace}
- {name: tmp, mountPath: /tmp}
{{- if .Values.engines.enabled }}
- {name: engines, mountPath: /run/secrets/headrace-engines, readOnly: true}
{{- end }}
{{- if .Values.models.claim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{/* tls: the Secret of this end's certificates for the wire between gateways and engines */}}
{{- define "headrace.volumes" -}}
{{- with .root.Values -}}
- name: cache
  {{- if .cache.claim }}
  persistentVolumeClaim: {claimName: {{ .cache.claim }}}
  {{- else if .cache.hostPath }}
  hostPath: {path: {{ .cache.hostPath }}, type: Directory}
  {{- else }}
  emptyDir: {sizeLimit: {{ .cache.size }}}
  {{- end }}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
{{- if .engines.enabled }}
- name: engines
  secret: {secretName: {{ $.tls }}, defaultMode: 0440}
{{- end }}
{{- with .models.claim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- end }}
{{- end }}

{{- define "headrace.placement" -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with index $ $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
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
{{- $_ := set $hosts (printf "models[%d]" $i) (regexFindAll "\"(s3|gs|oci)://[^\"]*" (toJson $model) 1) }}
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
{{- if $v.engines.enabled }}
{{- if not (and $v.engines.tls.gateway $v.engines.tls.engine) }}
{{- fail "engines.tls: names no Secrets for gateway and engine. Between pods the wire speaks TLS: docs/kubernetes.md has the commands." }}
{{- end }}
{{- $elsewhere := regexFind "(s3|gs|oci)://[^\"]*" (toJson (list $v.engines.model $v.engines.args)) }}
{{- if and $v.networkPolicy.enabled (not $v.networkPolicy.egress) $elsewhere }}
{{- printf "networkPolicy.egress: is empty, and engines read %s. Write rules for it, or set networkPolicy.enabled to false." $elsewhere | fail }}
{{- end }}
{{- if ne $v.autoscaling.kind "none" }}
{{- fail "autoscaling.kind: hpa and keda count the sequences of each pod's own engines, and gateway pods share those of engines.enabled." }}
{{- end }}
{{- range $v.engines.args }}
{{- if regexMatch "^(-tp|--tensor-parallel-size)" . }}
{{- printf "engines.args: %s is for several ranks in a pod, and a pod has one. Set engines.stages, or leave engines.enabled out: one pod has all ranks." . | fail }}
{{- end }}
{{- if regexMatch "^(-pp|--pipeline-parallel-size)" . }}
{{- printf "engines.args: %s is set by engines.stages. Leave it out." . | fail }}
{{- end }}
{{- if regexMatch "^--(config|listen|tls-dir|tls-name|token-file|name|drain-timeout|rank|rendezvous)" . }}
{{- printf "engines.args: %s is set by the chart. Leave it out." . | fail }}
{{- end }}
{{- end }}
{{- /* Of the 63 characters of a pod's label the hash of its StatefulSet takes 11, -engines 8, and the number of a group 4. */}}
{{- $longest := ternary 40 44 (include "headrace.hasStages" . | empty | not) }}
{{- if gt (len .Release.Name) $longest }}
{{- printf "the release's name: %s has %d characters, and with engines.enabled no pod can be made for more than %d. Choose a shorter one." .Release.Name (len .Release.Name) $longest | fail }}
{{- end }}
{{- $service := printf "%s-engines" .Release.Name }}
{{- $found := false }}
{{- range $i, $model := $v.config.models }}
{{- if eq (((($model.remote).kubernetes).service) | default "") $service }}
{{- $found = true }}
{{- if ne ($model.remote.tls_dir | default "") "/run/secrets/headrace-engines" }}
{{- printf "config.models[%d].remote.tls_dir: must be /run/secrets/headrace-engines, where the Secret engines.tls.gateway is." $i | fail }}
{{- end }}
{{- end }}
{{- end }}
{{- if not $found }}
{{- printf "config.models: no model has remote.kubernetes.service %s, the Service of engines." $service | fail }}
{{- end }}
{{- end }}
{{- $own := include "headrace.engines.workload" . }}
{{- $scaled := "" }}
{{- range $i, $model := $v.config.models }}
{{- with ($model.remote).kubernetes }}
{{- if $model.autoscale }}
{{- if not (and $v.engines.enabled (eq (.workload | default "") $own)) }}
{{- printf "config.models[%d].remote.kubernetes.workload: autoscale is allowed for %s of engines.enabled alone, by this chart's Role. Write that, or leave autoscale out." $i $own | fail }}
{{- end }}
{{- if ne (.namespace | default $.Release.Namespace) $.Release.Namespace }}
{{- printf "config.models[%d].remote.kubernetes.namespace: is %s, and this chart's Role allows autoscale in %s alone. Leave one of them out." $i .namespace $.Release.Namespace | fail }}
{{- end }}
{{- if $scaled }}
{{- printf "config.models[%d].autoscale: %s is scaled by the load of %s already. Leave it out of one of them." $i $own $scaled | fail }}
{{- end }}
{{- $scaled = printf "config.models[%d]" $i }}
{{- end }}
{{- if and $v.engines.enabled (eq .service (printf "%s-engines" $.Release.Name)) (not (has (.workload | default "") (list "" $own))) }}
{{- printf "config.models[%d].remote.kubernetes.workload: is %s, and the pods of %s are those of %s. Write that, or leave it out." $i .workload .service $own | fail }}
{{- end }}
{{- end }}
{{- end }}
{{- $first := first $v.config.models | default dict }}
{{- if and $v.inferencePool.enabled (or (ne (len $v.config.models) 1) (ne (int ($first.replicas | default 1)) 1) (not $first.engine)) }}
{{- fail "inferencePool: a picker reads one engine's gauges of a pod. config.models must have one model with one replica and no remote." }}
{{- end }}
{{- end }}
