#!/usr/bin/env bash
# Installs Debian packages, as root or where sudo asks for no password. Fails where it can't.
#   scripts/apt_install.sh PACKAGE...
set -euo pipefail
as_root=()
if [[ $(id -u) != 0 ]]; then as_root=(sudo -n); fi
export DEBIAN_FRONTEND=noninteractive
command -v apt-get >/dev/null
"${as_root[@]}" true 2>/dev/null
"${as_root[@]}" apt-get update -qq >/dev/null
"${as_root[@]}" apt-get install -qq -y --no-install-recommends "$@" >/dev/null
