# shellcheck shell=bash
# Sourced by ./annulus and the scripts in tools/. Shows progress on standard error; follows Bazel's builds; and refuses to
# build for a user who cannot write in this folder.

# How progress is shown, as ANNULUS_PROGRESS says: live (one line that is overwritten), plain (lines) or none. By default
# it is live on a terminal, and else none, because what is captured is to hold only what the command itself says. A
# script whose users wait for its progress, such as tools/test.sh, sets live_elsewhere=plain before it sources this file.
live_mode=${ANNULUS_PROGRESS-}
if [[ ! $live_mode && -t 2 ]]; then
  [[ ${TERM:-dumb} == dumb ]] && live_mode=plain || live_mode=live
fi
: "${live_mode:=${live_elsewhere-none}}"
live_at=-10 live_shown='' live_width=0

# live TEXT: shows what is being done. TEXT replaces the previous one, or is a line, at most every 10 s.
live() {
  if [[ $live_mode == live ]]; then
    ((live_width)) || live_width=$(stty size <&2 2>/dev/null) || live_width=
    [[ $live_width == *' '* ]] && live_width=${live_width#* }
    [[ $live_width =~ ^[1-9][0-9]*$ ]] || live_width=80
    printf '\r\033[K%s' "${1:0:live_width-1}" >&2
    live_shown=1
  elif [[ $live_mode == plain ]] && ((SECONDS - live_at >= 10)); then
    live_at=$SECONDS
    printf '%s\n' "$1" >&2
  fi
}

# Removes the live line. Call it before printing anything else.
live_end() {
  [[ $live_shown ]] && printf '\r\033[K' >&2
  live_shown=''
}

# Sets $left to what DONE of TOTAL lets expect, ", about 3 min left", or to nothing while too little of PHASE is done.
left='' left_phase='' left_from=0 left_began=0
estimate_left() { # PHASE DONE TOTAL
  if [[ $1 != "$left_phase" ]]; then left_phase=$1 left_from=$2 left_began=$SECONDS; fi
  local done=$(($2 - left_from)) seconds=$((SECONDS - left_began))
  left=''
  ((done >= 3 && seconds >= 5 && $3 > $2)) || return 0
  seconds=$((seconds * ($3 - $2) / done))
  if ((seconds < 60)); then left=', less than a minute left'; else left=", about $(((seconds + 30) / 60)) min left"; fi
}

# Reads Bazel's messages: progress becomes the live line, everything else goes to the file LOG (and to stderr, with
# SHOW=show, for a user who asked Bazel to say more). It ignores Ctrl-C, which Bazel handles, and reads on until Bazel
# ends.
follow_bazel() { # LOG [SHOW]
  trap '' INT
  local line what
  local progress='^\[([0-9,]+) / ([0-9,]+)\] (.*)$' tests='^([0-9]+) / ([0-9]+) tests(, ([0-9]+) failed)?;? ?(.*)$'
  while IFS= read -r line || [[ $line ]]; do
    if [[ $line =~ $progress ]]; then
      local step=${BASH_REMATCH[1]} steps=${BASH_REMATCH[2]}
      what=${BASH_REMATCH[3]}
      if [[ $what =~ $tests ]]; then
        # Bazel finds out on the way how many steps there are, but knows the number of tests from the start.
        local failed=${BASH_REMATCH[4]:+, ${BASH_REMATCH[4]} failed} ended="${BASH_REMATCH[1]} of ${BASH_REMATCH[2]}"
        estimate_left tests "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"
        what=${BASH_REMATCH[5]%%;*}
        live "tests  $ended done$failed$left  (step $step of $steps)  $what"
      elif [[ $what != *BazelWorkspaceStatusAction* ]]; then
        estimate_left steps "${step//,/}" "${steps//,/}"
        what=${what#"[Prepa] "}
        live "build  $step of $steps$left  ${what%%;*}"
      fi
    elif [[ $line == Loading:* || $line == Analyzing:* || $line == '    currently loading:'* ]]; then
      [[ $live_mode != live ]] || live "build  reading the build files"
    elif [[ $line == 'FAIL: '* ]]; then # shown at once; the report comes at the end
      live_end
      printf '%s\n' "${line%% (see *}" >&2
    elif [[ $line == 'Another command'* || $line == *'waiting for it to complete'* ]]; then
      live "build  waiting for another build in this folder to end"
    else
      printf '%s\n' "$line" >>"$1"
      [[ ${2-} == show ]] && live_end && printf '%s\n' "$line" >&2
    fi
  done
  live_end
}

# Prints what the compiler said in a log of follow_bazel, each message once, without Bazel's own words around it.
compiler_messages() { # LOG
  awk '
    /^(INFO|DEBUG|Loading|Analyzing|Starting local|Extracting|FAILED: Build did NOT|Target \/\/|  \.bazel\/|Use --)/ { next }
    /^WARNING: (Running Bazel|The following configs|Target pattern parsing failed)/ { next }
    /^\/\/.* +(PASSED|FAILED|TIMEOUT|FLAKY|SKIPPED|NO STATUS|FAILED TO BUILD)/ { next }
    /^ERROR: .*: (Compiling|Linking|Action|Couldn)/ {
      sub(/^ERROR: [^ ]*: /, ""); sub(/: \(Exit [0-9]+\).*/, ""); sub(/: error executing.*/, "")
      skip = seen[$0]++; if (!skip) print "\n" $0 ":"; next
    }
    /^(ERROR|FAIL|FLAKY|TIMEOUT):/ { skip = /^(FAIL|FLAKY|TIMEOUT):/ || seen[$0]++; if (!skip) print; next }
    !skip && NF { print }' "$1"
}

# Builds the targets, for CUDA if set-up found it, and exits if that fails or is interrupted. Call it in the repository,
# after set-up.
build_or_exit() { # TARGETS...
  local log rc=0 config=()
  ! grep -qx 'cuda 1' .bazel/setup || config=(--config=cuda)
  log=$(mktemp)
  bazel build ${config[@]+"${config[@]}"} --curses=no --color=no --show_progress_rate_limit=0.3 "$@" 2>&1 | follow_bazel "$log" || rc=$?
  ((rc == 0)) || compiler_messages "$log" >&2
  rm -f "$log"
  if ((rc == 8 || rc == 130)); then exit 130; fi # Ctrl-C
  ((rc == 0)) && return
  echo "annulus: the build failed; the compiler's messages are above" >&2
  exit 1
}

# Whether nothing can be built here because the folder cannot be written: another user's clone, or a read-only disk.
cannot_build() { # FOLDER
  if [[ -e $1/.bazel ]]; then [[ ! -w $1/.bazel ]]; else [[ ! -w $1 ]]; fi
}
# PROGRAM is what the owner has built, if anything. Bazel keeps it in the owner's home, which other users may not be able
# to read, and it may be older than the sources; a folder that `install` makes has neither problem.
refuse_to_build() { # FOLDER [PROGRAM]
  local owner
  owner=$(stat -c %U "$1")
  if [[ $owner == "$(id -un)" ]]; then
    printf 'annulus: %s cannot be written, so nothing can be built in it.\nMake it writable, or build in another clone:  git clone %q\n' "$1" "$1"
  else
    printf 'annulus: %s belongs to %s, and you cannot build in it.\n' "$1" "$owner"
    if [[ ${2-} && ! -x $2 ]]; then
      printf 'What %s has built lies in %s, which you cannot run.\n' "$owner" "$2"
    elif [[ ${2-} ]]; then
      printf 'What %s has built is not up to date.\n' "$owner"
    fi
    printf 'Ask %s to run  %q install PREFIX  for a folder that everybody can read, and run PREFIX/bin/annulus;\n' "$owner" "$1/annulus"
    printf 'or build in a clone of your own:  git clone %q\n' "$1"
  fi >&2
  exit 8
}
