// What a terminal can show: for lines that are written over. Used by progress lines and by launch.
#pragma once

namespace annulus {

// True for a terminal that can erase a line; not for a file or a pipe, nor where TERM is "dumb", empty or not set.
bool takes_escapes(int fd);

// How many columns a line of output has: ANNULUS_COLUMNS, by which `launch` hands down those of its terminal, else what
// the terminal `fd` has now, else 80.
int terminal_columns(int fd);

}  // namespace annulus
