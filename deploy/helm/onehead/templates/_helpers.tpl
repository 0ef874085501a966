{{/* The name of everything in a release. */}}
{{- define "onehead.name" -}}
{{- if contains "onehead" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-onehead{{ end }}
{{- end }}

{{- define "onehead.selector" -}}
app.kubernetes.io/name: onehead
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end }}

{{- define "onehead.labels" -}}
app.kubernetes.io/name: onehead
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "onehead.image" -}}
{{ .Values.image.repository }}{{ with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{/* What --model gets: nothing for the embedded model. */}}
{{- define "onehead.model" -}}
{{- with .Values.model -}}
{{- if and .claim .repository }}{{ fail "model.claim and model.repository are both set; a server has one model" }}{{ end -}}
{{- if and .path (not .claim) }}{{ fail "model.path is a folder in model.claim, which is not set" }}{{ end -}}
{{- if and (not .repository) (or .revision .file .cacheClaim .tokenSecret) }}
{{- fail "model.revision, file, cacheClaim and tokenSecret are of model.repository, which is not set" }}{{ end -}}
{{- if .claim -}}
/model{{ with .path }}/{{ . }}{{ end }}
{{- else if .repository -}}
{{ .repository }}{{ with .revision }}@{{ . }}{{ end }}{{ with .file }}:{{ . }}{{ end }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Whether a Job downloads the model: "true" or nothing. */}}
{{- define "onehead.prePull" -}}
{{- with .Values.model }}{{ if and .repository .cacheClaim .prePull }}true{{ end }}{{ end -}}
{{- end }}

{{- define "onehead.keysSecret" -}}
{{- if and .Values.keys.secret .Values.keys.file }}{{ fail "keys.secret and keys.file are both set; the file would be ignored" }}{{ end -}}
{{- with .Values.keys.secret }}{{ . }}{{ else }}{{ if .Values.keys.file }}{{ include "onehead.name" . }}-keys{{ end }}{{ end -}}
{{- end }}

{{/* An option's value for the environment. Numbers as JSON writes them: Helm reads floats, and would print 4000000 as 4e+06. */}}
{{- define "onehead.value" -}}
{{- if kindIs "slice" . }}{{ join "," . }}{{ else if kindIs "string" . }}{{ . }}{{ else }}{{ toJson . }}{{ end -}}
{{- end }}

{{- define "onehead.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "onehead.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: {{ .Values.readOnlyRoot }}
capabilities: {drop: [ALL]}
{{- end }}

{{/* Names of hosts can be asked for everywhere. */}}
{{- define "onehead.dns" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end }}
