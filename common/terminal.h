// What a terminal can show, for lines that are overwritten. Used by progress lines and by `launch`. Thread safe as long
// as no thread changes the environment.
#pragma once

namespace annulus {

// Whether `fd` is a terminal that can erase a line. False for a file or a pipe, and if TERM is "dumb", empty or not
// set.
bool takes_escapes(int fd);

// The number of columns of a line of output: ANNULUS_COLUMNS, with which `launch` passes on those of its terminal;
// otherwise those that the terminal `fd` has now; otherwise 80.
int terminal_columns(int fd);

}  // namespace annulus
