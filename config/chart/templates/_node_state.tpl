{{- /* Variables with which a container finds its own pod. */ -}}
{{- define "bindguard.ownPodEnv" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
{{- end }}

{{- /* Not empty if the agent has a service account. */ -}}
{{- define "bindguard.agentAccount" -}}
{{- if and (include "bindguard.agent" .) (or (ne .Values.agent.events "off") .Values.agent.stateAnnotation.enabled .Values.agent.kubediag.enabled) }}true{{ end -}}
{{- end }}

{{- /* Not empty if the installer's pod is annotated. */ -}}
{{- define "bindguard.installerState" -}}
{{- if and .Values.stateAnnotation.enabled (eq .Values.mode "install") }}true{{ end -}}
{{- end }}

{{- /* Beside the installer: it annotates the pod with the node's state. */ -}}
{{- define "bindguard.stateContainer" -}}
- name: node-state
  image: {{ include "bindguard.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: ["bindguard-agent", "annotate-pod", "--", "bindguard", "status", "--root", "/host", "--json"]
  env: {{- include "bindguard.ownPodEnv" . | nindent 4 }}
  # it reads other mount namespaces, as `bindguard status` does
  securityContext:
    privileged: true
    readOnlyRootFilesystem: true
  resources: {{- toYaml .Values.resources | nindent 4 }}
  volumeMounts:
    - name: host
      mountPath: /host
      readOnly: true
      mountPropagation: HostToContainer
    - name: account
      mountPath: /var/run/secrets/kubernetes.io/serviceaccount
      readOnly: true
{{- end }}

{{- /* The service account's files, for one container of a pod. */ -}}
{{- define "bindguard.accountVolume" -}}
- name: account
  projected:
    sources:
      - serviceAccountToken:
          path: token
      - configMap:
          name: kube-root-ca.crt
          items:
            - key: ca.crt
              path: ca.crt
      - downwardAPI:
          items:
            - path: namespace
              fieldRef:
                fieldPath: metadata.namespace
{{- end }}

{{- /* The right to patch pods of the release's namespace, and the policy that restricts it to the own pod: a dict with name,
account, policy, labels, and the chart's own context. */ -}}
{{- define "bindguard.ownPodRights" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ .name }}
  namespace: {{ .Release.Namespace }}
  labels: {{- .labels | nindent 4 }}
rules:
  - apiGroups: [""]
    resources: ["pods"]
    verbs: ["patch"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ .name }}
  namespace: {{ .Release.Namespace }}
  labels: {{- .labels | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ .name }}
subjects:
  - kind: ServiceAccount
    name: {{ .account }}
    namespace: {{ .Release.Namespace }}
{{- if .policy }}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata:
  name: {{ .name }}
  labels: {{- .labels | nindent 4 }}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules:
      - apiGroups: [""]
        apiVersions: ["v1"]
        operations: ["UPDATE"]
        resources: ["pods"]
  matchConditions:
    - name: of-bindguard
      expression: request.userInfo.username == 'system:serviceaccount:{{ .Release.Namespace }}:{{ .account }}'
  variables:
    - name: pod
      expression: request.userInfo.extra[?'authentication.kubernetes.io/pod-name'][0].orValue('')
  validations:
    - expression: variables.pod == object.metadata.name
      message: bindguard may annotate only its own pod
    - expression: object.spec == oldObject.spec
      message: bindguard may change only annotations
    - expression: object.metadata.?labels == oldObject.metadata.?labels
      message: bindguard may change only annotations
    - expression: object.metadata.?ownerReferences == oldObject.metadata.?ownerReferences
      message: bindguard may change only annotations
    - expression: object.metadata.?finalizers == oldObject.metadata.?finalizers
      message: bindguard may change only annotations
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ .name }}
  labels: {{- .labels | nindent 4 }}
spec:
  policyName: {{ .name }}
  validationActions: ["Deny"]
{{- end }}
{{- end }}
