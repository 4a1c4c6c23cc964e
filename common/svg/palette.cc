// See palette.h.
#include "common/svg/palette.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

namespace annulus {
namespace {

struct Rgb {
  double red, green, blue;
};

// The colours of a scale at equal distances.
constexpr std::array<Rgb, 3> kBlueStops = {{{0xee, 0xf3, 0xf8}, {0x7f, 0xa8, 0xd6}, {0x17, 0x47, 0x7f}}};
constexpr std::array<Rgb, 6> kViridisStops = {{{0x47, 0x2d, 0x7b},
                                               {0x3b, 0x52, 0x8b},
                                               {0x2c, 0x72, 0x8e},
                                               {0x21, 0x91, 0x8c},
                                               {0x4d, 0xb8, 0x6b},
                                               {0xc2, 0xd4, 0x2c}}};
constexpr std::array<Rgb, 5> kPlasmaStops = {
    {{0x2a, 0x0a, 0x92}, {0x7e, 0x03, 0xa8}, {0xcc, 0x47, 0x78}, {0xf0, 0x80, 0x4e}, {0xf2, 0xc0, 0x3d}}};

std::span<const Rgb> stops_of(ColorScale scale) {
  if (scale == ColorScale::kBlues) return kBlueStops;
  if (scale == ColorScale::kViridis) return kViridisStops;
  return kPlasmaStops;
}

// The relative luminance of WCAG 2.2.
double luminance(uint32_t color) {
  const auto linear = [](uint32_t channel) {
    const double c = static_cast<double>(channel) / 255;
    return c <= 0.04045 ? c / 12.92 : std::pow((c + 0.055) / 1.055, 2.4);
  };
  return 0.2126 * linear(color >> 16 & 0xff) + 0.7152 * linear(color >> 8 & 0xff) + 0.0722 * linear(color & 0xff);
}

}  // namespace

std::string scale_color(ColorScale scale, double share) {
  const std::span<const Rgb> stops = stops_of(scale);
  const double at = std::clamp(share, 0.0, 1.0) * static_cast<double>(stops.size() - 1);
  const auto stop = std::min(static_cast<size_t>(at), stops.size() - 2);
  const double t = at - static_cast<double>(stop);
  const auto mixed = [&](double Rgb::*channel) {
    const double a = stops[stop].*channel, b = stops[stop + 1].*channel;
    return static_cast<unsigned>(std::round(a + t * (b - a)));
  };
  std::array<char, 8> text{};
  std::snprintf(text.data(), text.size(), "#%02x%02x%02x", mixed(&Rgb::red), mixed(&Rgb::green), mixed(&Rgb::blue));
  return text.data();
}

std::string_view text_color_on(std::string_view color) {
  const double light =
      luminance(static_cast<uint32_t>(std::strtoul(std::string(color.substr(1)).c_str(), nullptr, 16))) + 0.05;
  return 1.05 / light > light / 0.05 ? "#ffffff" : "#000000";
}

}  // namespace annulus
