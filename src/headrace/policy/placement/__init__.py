"""Where a model goes: sizes of a model in bytes and FLOPs, the time of a step on given devices, and the layout over them that is best."""
