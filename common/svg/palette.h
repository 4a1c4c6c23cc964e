// The colours of pictures: hues that people with colour blindness can tell apart, scales whose lightness grows
// steadily, and the text that is readable on a colour. Used by charts of this package and by pictures of hosts and
// plans.
//
// Thread safety: functions without state.
#pragma once

#include <array>
#include <string>
#include <string_view>

namespace annulus {

// A strong colour for lines and areas, and a light tint of it for boxes with text.
struct Hue {
  std::string_view line, tint;
};

// Colours after Okabe and Ito (jfly.uni-koeln.de/color), and two more. The last one is gray, for what has no colour of
// its own.
inline constexpr std::array<Hue, 8> kHues = {{{"#0072b2", "#d6e9f5"},
                                              {"#d55e00", "#f9e0cf"},
                                              {"#009e73", "#cfeee4"},
                                              {"#b8578f", "#f4deeb"},
                                              {"#b07d00", "#f6e8c4"},
                                              {"#3a9bd6", "#ddf0fb"},
                                              {"#6a4fa0", "#e4def1"},
                                              {"#5c6670", "#e4e7eb"}}};

// Scales of colours, from 0 to 1.
enum class ColorScale {
  kBlues,    // shares: light to dark blue
  kViridis,  // an order: dark violet over green to yellow (Smith and van der Walt, 2015), without its ends
  kPlasma,   // another order: blue over red to yellow, likewise
};

// Returns the colour "#rrggbb" at `share`, 0 to 1, of a scale.
std::string scale_color(ColorScale scale, double share);

// Returns black or white: the one that is the more readable as text on a colour "#rrggbb".
std::string_view text_color_on(std::string_view color);

}  // namespace annulus
