"""The fleet: keeps the gateways and engines of one machine running.

`config` describes what to run, `weights` turns a model's name into a folder, `launcher` starts one process, `keeper` keeps one running,
`supervisor` keeps all of them and takes them down in order. docs/fleet.md has the why.
"""
