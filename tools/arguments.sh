# shellcheck shell=bash
# Sourced by ./annulus and the scripts in tools/. Settles what a script inherits, refuses arguments that it does not take, and
# adds up the counts that scripts of tests end with.

# A standard stream that is closed leads to /dev/null, as in launcher/program.cc. Otherwise the next file that is opened
# would get its number.
[[ -e /proc/self/fd/0 ]] || exec 0</dev/null
[[ -e /proc/self/fd/1 ]] || exec 1>/dev/null
[[ -e /proc/self/fd/2 ]] || exec 2>/dev/null

# Exits with 2 if an argument is empty, also in --name=. It most often comes from a variable of the shell that is not
# set, and would be taken for one that was not given.
refuse_empty_arguments() { # COMMAND ARGUMENTS...
  local command=$1 arg number=0
  shift
  for arg; do
    ((++number))
    if [[ $arg =~ ^(--[^=]+)=$ ]]; then
      arg='' number=${BASH_REMATCH[1]}
    fi
    [[ ! $arg ]] || continue
    [[ $number == --* ]] || number="argument $number"
    echo "$command: $number is empty: give it a value, or leave it out (is a variable of the shell not set?)" >&2
    exit 2
  done
}

# What a script for `./annulus NAME` begins with if it takes no arguments: for --help it prints the comment at its head.
refuse_arguments() { # NAME ARGUMENTS...
  refuse_empty_arguments "annulus: $1" "${@:2}"
  case ${2-} in
    '') ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "tools/${BASH_SOURCE[1]##*/}" && exit 0 ;;
    *) echo "./annulus $1 takes no arguments, got: ${*:2}" >&2 && exit 2 ;;
  esac
}

# Adds what the last line of tests says, "N passed, N failed", to $passed and $failed. Without that line, or if only their
# exit code says so, one has failed.
add_counts() { # LINE EXIT-CODE
  if [[ $1 =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed$ ]]; then
    ((passed += BASH_REMATCH[1], failed += BASH_REMATCH[2])) || true
    [[ $2 == 0 || ${BASH_REMATCH[2]} != 0 ]] || ((++failed))
  else
    ((++failed))
  fi
}
