# shellcheck shell=bash
# Sourced by ./annulus and the scripts in tools/. Settles what a script inherits, and refuses empty arguments.

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
