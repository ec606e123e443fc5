{{- define "trainwright.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- /* Fifty characters at most: the objects' own suffixes have to fit behind it. */ -}}
{{- define "trainwright.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "trainwright.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "trainwright.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "trainwright.selectorLabels" -}}
app.kubernetes.io/name: {{ include "trainwright.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "trainwright.labels" -}}
{{ include "trainwright.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- /* A tag of digits alone may come as a number, which Helm would write with an exponent. */ -}}
{{- define "trainwright.tag" -}}
{{- $tag := default .Chart.AppVersion .Values.image.tag -}}
{{- kindIs "string" $tag | ternary $tag ($tag | int64) -}}
{{- end -}}

{{- define "trainwright.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (include "trainwright.tag" .) -}}
{{- end -}}
{{- end -}}

{{- define "trainwright.workerImage" -}}
{{- default (printf "trainwright/worker:%s" .Chart.AppVersion) .Values.worker.image -}}
{{- end -}}

{{- /* Variables of the limits that are set. Numbers come as floats, which Helm would write with an exponent. */ -}}
{{- define "trainwright.limits" -}}
{{- $limits := .Values.limits | default dict -}}
{{- $variables := dict "maxPriority" "MAX_PRIORITY" "plansPerNamespace" "PLANS_PER_NAMESPACE" "maxTerminationGracePeriodSeconds" "MAX_GRACE_SECONDS" -}}
{{- range $name, $variable := $variables -}}
{{- if not (kindIs "invalid" (index $limits $name)) }}
- name: TRAINWRIGHT_{{ $variable }}
  value: {{ index $limits $name | int64 | quote }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Hours for which a job of a plan's own may hold devices; empty: no limit. */ -}}
{{- define "trainwright.handoverHours" -}}
{{- $handover := .Values.handover | default dict -}}
{{- $hours := index $handover "maxHours" -}}
{{- if not (kindIs "invalid" $hours) -}}
{{- if ne (dig "allow" "Free" $handover) "Owned" -}}
{{- printf "handover.maxHours: only a job of a plan's own is ended, got handover.allow %s; set handover.allow=Owned, or leave maxHours out" (dig "allow" "Free" $handover) | fail -}}
{{- end -}}
{{- $hours | int64 -}}
{{- end -}}
{{- end -}}

{{- /*
Watched namespaces with commas between them; empty: all. An upgrade without a value keeps those of the release, which it
reads from the cluster: where it cannot (helm template), the release counts as new.
*/ -}}
{{- define "trainwright.watched" -}}
{{- $watched := include "trainwright.watchedNames" . -}}
{{- range list "kube-system" "kube-public" "kube-node-lease" -}}
{{- if has . (splitList "," $watched) }}{{ printf "watchNamespaces: %s is a namespace of Kubernetes itself, whose plans are left alone; name others" . | fail }}{{ end -}}
{{- end -}}
{{- $watched -}}
{{- end -}}

{{- define "trainwright.watchedNames" -}}
{{- if has "*" .Values.watchNamespaces -}}
{{- if gt (len .Values.watchNamespaces) 1 }}{{ fail "watchNamespaces: \"*\" means all namespaces; remove the other names, or the asterisk" }}{{ end -}}
{{- else if .Values.watchNamespaces -}}
{{- join "," .Values.watchNamespaces -}}
{{- else -}}
{{- $watched := .Release.Namespace -}}
{{- $before := lookup "apps/v1" "Deployment" .Release.Namespace (include "trainwright.fullname" .) | default dict -}}
{{- range dig "spec" "template" "spec" "containers" (list) $before -}}
{{- range .env -}}
{{- if eq .name "TRAINWRIGHT_WATCH_NAMESPACES" }}{{ $watched = .value | default "" }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $watched -}}
{{- end -}}
{{- end -}}

{{- /* For a list of the chart and the value that asks for one of the Prometheus operator's objects. */ -}}
{{- define "trainwright.needsPrometheusOperator" -}}
{{- $value := index . 1 -}}
{{- if not ((index . 0).Capabilities.APIVersions.Has "monitoring.coreos.com/v1") -}}
{{- printf "%s is true, but the cluster has no monitoring.coreos.com/v1 API; install the Prometheus operator first, or set %s=false (helm template sees no cluster: add --api-versions monitoring.coreos.com/v1)" $value $value | fail -}}
{{- end -}}
{{- end -}}
