#!/usr/bin/env bash
# Installs Debian's HAProxy and nginx for tests/e2e/test_balancers.py and bench.storms.balancers, where they are not installed yet, without
# starting them. Needs root and a Debian or Ubuntu that packages them.
set -euo pipefail
missing=()
command -v haproxy > /dev/null || missing+=(haproxy)
command -v nginx > /dev/null || missing+=(nginx)
if [ ${#missing[@]} -eq 0 ]; then
  exit 0
fi
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then # Debian starts a daemon when it is installed, unless this script forbids it
  printf '#!/bin/sh\nexit 101\n' > "$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
apt-get update --quiet
DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends "${missing[@]}"
haproxy -v | head -1
nginx -v
