{{- define "bindguard.image" -}}
{{- $registry := required "set image.registry to the registry that has your image of bindguard" .Values.image.registry -}}
{{- $image := printf "%s/%s" $registry .Values.image.repository -}}
{{- $digest := .Values.image.digest -}}
{{- /* The chart of a release has the digest of the release's image. */ -}}
{{- if not (or $digest .Values.image.tag) }}{{ $digest = index (.Chart.Annotations | default dict) "bindguard.io/image-digest" }}{{ end -}}
{{- if $digest -}}
{{ $image }}@{{ $digest }}
{{- else -}}
{{ $image }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- /* The name of the objects, or the start of their names. */ -}}
{{- define "bindguard.name" -}}
{{ .Values.fullnameOverride | default .Release.Name }}
{{- end }}

{{- define "bindguard.commonLabels" -}}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* How an update replaces pods: a dict with type and maxUnavailable. */ -}}
{{- define "bindguard.updateStrategy" -}}
type: {{ .type }}
{{- if eq .type "RollingUpdate" }}
rollingUpdate:
  maxUnavailable: {{ .maxUnavailable }}
{{- end }}
{{- end }}

{{- define "bindguard.labels" -}}
app.kubernetes.io/name: bindguard
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- include "bindguard.commonLabels" . }}
{{- end }}

{{- /* Not empty if the release has the node agent. A release that removes bindguard has none. */ -}}
{{- define "bindguard.agent" -}}
{{- if and .Values.agent.enabled (ne .Values.mode "remove") }}true{{ end -}}
{{- end }}

{{- define "bindguard.agentSelector" -}}
app.kubernetes.io/name: bindguard-agent
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "bindguard.agentLabels" -}}
{{ include "bindguard.agentSelector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- include "bindguard.commonLabels" . }}
{{- end }}

{{- /* Not empty if the agent has a service account. */ -}}
{{- define "bindguard.agentAccount" -}}
{{- if and (include "bindguard.agent" .) (or (ne .Values.agent.events "off") .Values.agent.kubediag.enabled) }}true{{ end -}}
{{- end }}

{{- /* The words of bindguard-agent, as JSON. */ -}}
{{- define "bindguard.agentWords" -}}
{{- $agent := .Values.agent -}}
{{- $address := printf "%s:%v" $agent.metrics.address $agent.metrics.port -}}
{{- $words := list "bindguard-agent" "--host" "/host" "--metrics" $address -}}
{{- if .Values.config }}{{ $words = concat $words (list "--config" "/config/config.toml") }}{{ end -}}
{{- if $agent.refresh }}{{ $words = concat $words (list "--refresh" $agent.refresh) }}{{ end -}}
{{- if $agent.nri.enabled }}{{ $words = concat $words (list "--nri" $agent.nri.socket) }}{{ end -}}
{{- if $agent.kubediag.enabled }}{{ $words = concat $words (list "--kubediag" $agent.kubediag.address) }}{{ end -}}
{{- if ne $agent.events "off" }}{{ $words = concat $words (list "--events" $agent.events) }}{{ end -}}
{{- if ne $agent.logLevel "info" }}{{ $words = concat $words (list "--log-level" $agent.logLevel) }}{{ end -}}
{{- if ne $agent.logFormat "text" }}{{ $words = concat $words (list "--log-format" $agent.logFormat) }}{{ end -}}
{{- concat $words $agent.extraArgs | toJson -}}
{{- end }}

{{- /* Not empty if nodes restart their runtimes one group after the other. */ -}}
{{- define "bindguard.hasSlots" -}}
{{- if and .Values.restart (gt (int .Values.restartSlots) 0) (ne .Values.mode "none") }}true{{ end -}}
{{- end }}

{{- /* The names of the leases, as JSON. */ -}}
{{- define "bindguard.slots" -}}
{{- $names := list -}}
{{- range until (int .Values.restartSlots) }}{{ $names = append $names (printf "%s-restart-%d" (include "bindguard.name" $) .) }}{{ end -}}
{{- $names | toJson -}}
{{- end }}

{{- /* The command that grants a slot. */ -}}
{{- define "bindguard.slotCommand" -}}
bindguard-agent restart-slot --namespace {{ .Release.Namespace }} --max-failures {{ .Values.restartFailures }}
{{- range include "bindguard.slots" . | fromJsonArray }} --lease {{ . }}{{ end -}}
{{- end }}

{{- /* The label of nodes on which pods of the handler start, as JSON. */ -}}
{{- define "bindguard.activeLabel" -}}
{{- if eq .Values.nodeLabel "patch" }}{"bindguard.io/active": "true"}
{{- else if eq .Values.nodeLabel "nfd" }}{"feature.node.kubernetes.io/bindguard": "true"}
{{- else }}{}
{{- end }}
{{- end }}

{{- define "bindguard.patchNodes" -}}
- apiGroups: [""]
  resources: ["nodes"]
  verbs: ["patch"]
{{- end }}

{{- /* The words of bindguard without --stay and --dry-run, as JSON. */ -}}
{{- define "bindguard.words" -}}
{{- $words := list "bindguard" "install" "--root" "/host" -}}
{{- if eq .mode "remove" -}}
{{- $words = list "bindguard" "uninstall" "--root" "/host" -}}
{{- else -}}
{{- if .Values.default }}{{ $words = append $words "--default" }}{{ end -}}
{{- if .Values.wrapper }}{{ $words = append $words "--wrapper" }}{{ end -}}
{{- if .Values.config }}{{ $words = concat $words (list "--node-config" "/config/config.toml") }}{{ end -}}
{{- if and .Values.config .Values.configForce }}{{ $words = append $words "--force-node-config" }}{{ end -}}
{{- $words = concat $words .Values.extraArgs -}}
{{- end -}}
{{- $words | toJson -}}
{{- end }}

{{- /* removal.timeout, such as 90s or 4m, in seconds. */ -}}
{{- define "bindguard.removalSeconds" -}}
{{- $timeout := .Values.removal.timeout -}}
{{- $number := trimSuffix "m" $timeout | trimSuffix "s" | int -}}
{{ ternary (mul 60 $number) $number (hasSuffix "m" $timeout) }}
{{- end }}

{{- /* The pod that installs or removes: a dict with mode, and the chart's own context. */ -}}
{{- define "bindguard.pod" -}}
{{- $words := include "bindguard.words" . | fromJsonArray -}}
{{- $hasConfig := and .Values.config (eq .mode "install") -}}
{{- /* The objects of a release are gone when its hook removes bindguard. */ -}}
{{- $hasSlots := and (include "bindguard.hasSlots" .) (not .isHook) -}}
{{- /* With --restart, a dry run fails while a restart is owed. */ -}}
{{- if .Values.restart }}{{ $words = append $words "--restart" }}{{ end -}}
{{- $command := $words -}}
{{- /* Nothing goes on after the hook, so its pods are ready when their nodes have no part left. */ -}}
{{- if .isHook }}{{ $words = append $words "--complete" }}{{ end -}}
{{- $patches := eq .Values.nodeLabel "patch" -}}
{{- if $patches }}{{ $command = concat $command (list "--node-label" "bindguard-agent node-label") }}{{ end -}}
{{- if eq .Values.nodeLabel "nfd" -}}
{{- $command = concat $command (list "--node-feature" "/etc/kubernetes/node-feature-discovery/features.d/bindguard") -}}
{{- end -}}
{{- $hasAccount := or $hasSlots $patches -}}
{{- if $hasSlots }}{{ $command = concat $command (list "--restart-slot" (include "bindguard.slotCommand" .)) }}{{ end -}}
nodeSelector: {{- toYaml .Values.nodeSelector | nindent 2 }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
tolerations: {{- toYaml .Values.tolerations | nindent 2 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
priorityClassName: {{ .Values.priorityClassName }}
automountServiceAccountToken: {{ $hasAccount }}
{{- if $hasAccount }}
serviceAccountName: {{ include "bindguard.name" . }}-{{ ternary "removal" "installer" (eq (toString .isHook) "true") }}
{{- else }}
# named, because the API server keeps a name that a change only leaves out
serviceAccountName: default
{{- end }}
# bindguard checks the node's daemons and containers; systemctl connects to the node's pid 1
hostPID: true
# time for containerd to restart
terminationGracePeriodSeconds: 60
containers:
  - name: {{ .mode }}
    image: {{ include "bindguard.image" . | quote }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    command: {{ append $command "--stay" | toJson }}
    {{- if $hasAccount }}
    env:
      - name: NODE_NAME
        valueFrom:
          fieldRef:
            fieldPath: spec.nodeName
    {{- end }}
    readinessProbe:
      exec:
        command: {{ append $words "--dry-run" | toJson }}
      {{- toYaml .Values.readinessProbe | nindent 6 }}
    securityContext:
      privileged: true
    resources: {{- toYaml .Values.resources | nindent 6 }}
    volumeMounts:
      - name: host
        mountPath: /host
        # without this, the pod would hold the node's mounts until it ends
        mountPropagation: HostToContainer
      {{- if $hasConfig }}
      - name: config
        mountPath: /config
        readOnly: true
      {{- end }}
volumes:
  - name: host
    hostPath:
      path: /
      type: Directory
  {{- if $hasConfig }}
  - name: config
    configMap:
      name: {{ include "bindguard.name" . }}-config
  {{- end }}
{{- end }}
