#!/usr/bin/env bash
# Makes this machine able to build and run the project: Debian packages that are missing, then the Python environment.
#
#   setup.sh            packages and environment; prints the interpreter's path on stdout, everything else on stderr
#   setup.sh lint       only the packages of `make lint`
#   setup.sh uninstall  removes the cache folder (Python environments of every checkout)
#
# Environment: PYTHON=path     interpreter to use instead of the cached environment; checked, never changed
#              SLICE_CACHE=dir where environments live; default ${XDG_CACHE_HOME:-~/.cache}/slicescheduler
# The environment is named by the hash of torch_plugin/requirements.txt, so every checkout with the same pins shares it.
# Safe to run twice at once (flock); a half-made environment is completed or made anew.
set -euo pipefail
export LC_ALL=C.UTF-8

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
requirements=$root/torch_plugin/requirements.txt
packages_file=$root/cmake/setup/packages.txt
cache=${SLICE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/slicescheduler}

venv_mib=5000          # measured: 4.9 GB after installation of the pins
download_mib=2700      # wheels, unpacked from the cache folder and deleted at the end
venv_seconds=95        # measured on a 2-core machine with a fast connection

say() { printf '%s\n' "$*" >&2; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# ---- Debian packages ------------------------------------------------------------------------------------------------

install_packages() {  # $1: "build" or "lint"
  local name group missing=()
  if ! command -v dpkg-query >/dev/null; then
    say "setup: not a Debian system: install what $packages_file lists by the means of yours (continuing)"
    return
  fi
  while read -r name group; do
    [[ -z $name || $name == \#* || ${group:-build} != "$1" ]] && continue
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null || true) == installed ]] || missing+=("$name")
  done <"$packages_file"
  [[ ${#missing[@]} -eq 0 ]] && return

  local as_root=()
  if [[ $(id -u) -ne 0 ]]; then
    command -v sudo >/dev/null || fail "these Debian packages are missing, and installing them needs root (there is no sudo here).
Run this as root, then the same make command again:
  apt-get update && apt-get install --no-install-recommends ${missing[*]}"
    as_root=(sudo)
  fi
  local get=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300)
  say "setup: installing Debian packages: ${missing[*]}"
  local log
  log=$(mktemp)
  if ! { "${get[@]}" update && "${get[@]}" install --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    fail "apt-get failed (its last lines are above). Put that right, or install by hand, then run the same make command again:
  ${as_root[*]:+sudo }apt-get update && ${as_root[*]:+sudo }apt-get install --no-install-recommends ${missing[*]}"
  fi
  rm -f "$log"
  say "setup: packages installed"
}

# ---- Python environment ---------------------------------------------------------------------------------------------

# Fails (with what is wrong on stdout) unless the interpreter has every pin at its version.
check_python() {
  "$1" - "$requirements" <<'PY'
import sys
from importlib import metadata
if sys.version_info < (3, 11):
    sys.exit(print("Python %d.%d is too old, 3.11 or newer is needed" % sys.version_info[:2]) or 1)
wrong = []
for line in open(sys.argv[1]):
    line = line.split("#")[0].strip()
    if not line:
        continue
    name, _, version = line.partition("==")
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        wrong.append(f"{name}=={version} is missing")
        continue
    # torch==2.11.0 also accepts local builds such as 2.11.0+cpu.
    if found.split("+")[0] != version:
        wrong.append(f"{name} is {found}, {version} is needed")
if wrong:
    sys.exit(print("; ".join(wrong)) or 1)
PY
}

mib_used() { { du -smc "$@" 2>/dev/null || true; } | tail -n 1 | cut -f 1; }  # folders may be missing

# Draws a bar (terminal) or a line every 15 s (log) until the process ends. $1 pid, $2.. folders that grow.
watch_install() {
  local pid=$1 total=$((venv_mib + download_mib)) start=$SECONDS last=-15 now done_mib percent
  shift
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    now=$((SECONDS - start))
    if [[ -t 2 ]] || ((now - last >= 15)); then
      last=$now
      done_mib=$(mib_used "$@")
      percent=$((done_mib * 100 / total)); ((percent > 99)) && percent=99
      if [[ -t 2 ]]; then
        local filled=$((percent * 30 / 100)) bar
        printf -v bar '%*s' "$filled" ''
        printf '\r  [%-30s] %3d %%  %4d MB  %3d s ' "${bar// /#}" "$percent" "$done_mib" "$now" >&2
      else
        say "  $percent %, $done_mib MB, $now s"
      fi
    fi
  done
  [[ -t 2 ]] && printf '\r%70s\r' '' >&2
  return 0
}

make_venv() {  # $1 folder
  local venv=$1 log=$1.log work=$1.download base need_mib free_mib
  base=/usr/bin/python3
  [[ -x $base ]] || base=$(command -v python3 || true)
  [[ -n $base ]] || fail "no python3 found: install the Debian packages python3 and python3-venv"

  if [[ -d $venv ]] && ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "setup: the environment in $venv is damaged: making it anew"
    rm -rf "$venv"
  fi
  rm -rf "$work"
  need_mib=$((venv_mib + download_mib - $(mib_used "$venv")))
  free_mib=$(df -Pm "$cache" | awk 'NR == 2 { print $4 }')
  say "setup: making the Python environment in $venv"
  say "  torch, transformers, numpy, matplotlib, pytest: 4.9 GB on disk, about $venv_seconds s here; free: $((free_mib / 1024)) GB"
  if ((free_mib < need_mib)); then
    fail "not enough space in $cache: $free_mib MB free, $need_mib MB needed while installing.
Free some, or name another folder with SLICE_CACHE=DIR, or an interpreter that has the pins with PYTHON=PATH."
  fi

  if [[ ! -d $venv ]] && ! "$base" -m venv "$venv" >"$log" 2>&1; then
    cat "$log" >&2
    rm -rf "$venv"
    fail "$base -m venv failed (its output is above). On Debian: apt-get install python3-venv"
  fi
  mkdir -p "$work"
  TMPDIR=$work "$venv/bin/python" -m pip install --no-cache-dir --disable-pip-version-check --no-input \
    --progress-bar off -r "$requirements" >>"$log" 2>&1 &
  local pid=$! ok=0
  trap 'kill "$pid" 2>/dev/null; rm -rf "$work"' EXIT
  watch_install "$pid" "$venv" "$work"
  wait "$pid" || ok=$?
  trap - EXIT
  rm -rf "$work"
  if ((ok != 0)); then
    tail -n 15 "$log" >&2
    fail "pip could not install $requirements (its last lines are above, all of them in $log).
If that was the network, run the same make command again."
  fi
  local wrong
  wrong=$(check_python "$venv/bin/python" 2>&1) || fail "the new environment is not as pinned: $wrong"
  date -u +%Y-%m-%dT%H:%M:%SZ >"$venv/.complete"
  rm -f "$log"
  say "setup: Python environment ready"
}

python_environment() {
  local wrong
  if [[ -n ${PYTHON:-} ]]; then
    local chosen
    chosen=$(command -v "$PYTHON") || fail "PYTHON=$PYTHON: no such program"
    wrong=$(check_python "$chosen" 2>&1) || fail "PYTHON=$chosen does not fit: $wrong
Install the pins there ($chosen -m pip install -r $requirements), or leave PYTHON unset."
    printf '%s\n' "$chosen"
    return
  fi
  local venv
  venv=$cache/venv-$(sha256sum "$requirements" | cut -c 1-12)
  if [[ ! -f $venv/.complete || ! -x $venv/bin/python ]]; then
    mkdir -p "$cache" || fail "cannot make $cache: choose another with SLICE_CACHE=DIR"
    exec 9>"$venv.lock"
    flock -n 9 || { say "setup: waiting for another set-up that makes $venv"; flock 9; }
    if [[ ! -f $venv/.complete || ! -x $venv/bin/python ]]; then
      rm -f "$venv/.complete"
      make_venv "$venv" >&2
    fi
    exec 9>&-
  fi
  printf '%s\n' "$venv/bin/python"
}

uninstall() {
  local found=()
  shopt -s nullglob
  found=("$cache"/venv-*)
  if [[ ${#found[@]} -eq 0 ]]; then
    say "nothing to remove in $cache"
    return
  fi
  say "removing ${found[*]} ($(mib_used "${found[@]}") MB)"
  rm -rf "${found[@]}"
  rmdir "$cache" 2>/dev/null || say "$cache holds other files: left as it is"
  say "Debian packages stay: remove those you do not want by apt-get (the list: $packages_file)"
}

case ${1:-} in
  "") install_packages build; python_environment ;;
  lint) install_packages lint ;;
  uninstall) uninstall ;;
  *) fail "unknown argument '$1' (lint, uninstall, or none)" ;;
esac
