#!/usr/bin/env bash
# Installs Debian packages that tests start servers of, where the program is missing:  tools/install_debian.sh PROGRAM[:PACKAGE] ...
# Tests start their own servers on loopback ports; no service of a package is started. Needs root and Debian or Ubuntu.
set -euo pipefail
missing=()
for each in "$@"; do
  command -v "${each%%:*}" > /dev/null || missing+=("${each##*:}")
done
if [ ${#missing[@]} -eq 0 ]; then
  exit 0
fi
policy=/usr/sbin/policy-rc.d # Debian starts a daemon when it is installed, unless this script forbids it. Images of containers often have one
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' > "$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
apt-get update --quiet
DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends "${missing[@]}"
dpkg-query --show "${missing[@]}"
