{{- /* What the operator reads of the cluster as a whole. */ -}}
{{- define "trainwright.clusterRules" -}}
- apiGroups: [""]
  resources: [nodes] # devices, their type and their number
  verbs: [list]
- apiGroups: [resource.k8s.io]
  resources: [resourceslices, deviceclasses] # the same, where drivers publish devices (DRA), and how pods ask for them
  verbs: [list]
- apiGroups: [kueue.x-k8s.io]
  resources: [clusterqueues, resourceflavors, topologies] # which nodes the queue of a plan has, and its quota of their devices
  verbs: [list]
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions] # whether PyTorchJob and JobSet are there, or come later
  verbs: [list, watch]
{{- if include "trainwright.watched" . }}
- apiGroups: [""]
  resources: [namespaces] # whether those that it watches are there, go or come back
  verbs: [list, watch]
{{- if .Values.rbac.allPods }}
- apiGroups: [""]
  resources: [pods] # devices that pods of other namespaces hold
  verbs: [list]
- apiGroups: [resource.k8s.io]
  resources: [resourceclaims] # the same, where devices are published by DRA
  verbs: [list]
{{- end }}
{{- end }}
{{- end -}}

{{- /* What the operator does in the namespaces of TrainingPlans. */ -}}
{{- define "trainwright.namespacedRules" -}}
- apiGroups: [trainwright.dev]
  resources: [trainingplans]
  verbs: [get, list, watch, delete] # delete: ttlSecondsAfterFinished
- apiGroups: [trainwright.dev]
  resources: [trainingplans/status]
  verbs: [patch]
- apiGroups: [kubeflow.org]
  resources: [pytorchjobs]
  verbs: [create, get, list, watch, delete]
- apiGroups: [jobset.x-k8s.io]
  resources: [jobsets]
  verbs: [create, get, list, watch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [localqueues, workloads] # the queue of a plan, and why its gang waits
  verbs: [list]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch] # patch: pins a worker to its node and lifts the operator's own scheduling gate
- apiGroups: [resource.k8s.io]
  resources: [resourceclaims] # devices that claims hold, where they are published by DRA
  verbs: [list]
- apiGroups: [""]
  resources: [pods/log] # workers report on their standard output
  verbs: [get]
- apiGroups: [""]
  resources: [configmaps] # tasks for the workers, measured tables, pages of answers
  verbs: [create, get, list, patch, delete]
{{- if .Values.worker.networkPolicy }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies] # isolates a gang; it goes with the gang's task
  verbs: [create]
{{- end }}
- apiGroups: [""]
  resources: [events] # list: they tell why a job gets no pods
  verbs: [create, list]
- apiGroups: [coordination.k8s.io]
  resources: [leases] # the claim: one release works on the plans of a namespace
  resourceNames: [trainwright-plans]
  verbs: [get, update]
- apiGroups: [coordination.k8s.io]
  resources: [leases] # what is created has no name yet when rights are looked at
  verbs: [create]
{{- end -}}
