// The capabilities of a terminal, for progress lines that are overwritten. Used by progress lines and by `launch`.
// Thread safe as long as no thread changes the environment.
#pragma once

namespace annulus {

// Returns whether `fd` is a terminal that can erase a line: false for a file or pipe, and if TERM is "dumb", empty or
// unset.
bool takes_escapes(int fd);

// Returns the width of the output in columns: ANNULUS_COLUMNS, which `launch` sets to the width of its terminal; else
// the current width of the terminal `fd`; else 80.
int terminal_columns(int fd);

}  // namespace annulus
