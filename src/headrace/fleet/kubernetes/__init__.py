"""Engines that run in a cluster's pods: which there are, and how many there should be.

`service` has the options, `watch` follows a Service's pods, `discovery` hands them to the reconciler, `api` speaks with the API server
(docs/kubernetes.md).
"""
