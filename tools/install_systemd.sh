#!/usr/bin/env bash
# Installs Debian's systemd for tests/fleet/test_systemd.py, where it is not installed yet: the program alone, nothing is started.
# Needs root and a Debian or Ubuntu that packages it.
set -euo pipefail
if command -v systemd-analyze > /dev/null; then
  exit 0
fi
apt-get update --quiet
DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends systemd
systemd-analyze --version
