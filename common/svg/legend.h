// The legend of a picture: samples, each with a text beside it, in as many lines as a width allows. Used by the charts
// of this package and by pictures of hosts and plans. A class for one thread.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "common/svg/canvas.h"

namespace annulus {

class Legend {
 public:
  static constexpr int kLine = 19;  // pixels from a line to the next

  // Begins at the baseline `at` of the first text and takes `width` pixels. The canvas must outlive it.
  Legend(SvgCanvas& canvas, Point at, int width) : canvas_(canvas), left_(at.x), width_(width), at_(at) {}

  // `sample` draws at an x coordinate, at most `room` pixels wide, around the middle of a line.
  void item(const std::string& text, const std::function<void(int x, int middle)>& sample, int room = 36);
  // With a filled box as the sample, or a horizontal line (canvas.h, line()).
  void swatch(const std::string& text, std::string_view fill, std::string_view stroke = "none");
  void stroke(const std::string& text, std::string_view color, std::string_view dash, bool arrow);
  // With the numbers 0, ..., count - 1 in a colour each: a swatch for each of at most 8, else a scale from the first to
  // the last. `name` stands before a number.
  void numbers(const std::string& name, int count, const std::function<std::string(int)>& color);
  void words(const std::string& text);  // without a sample
  void next_line();

  bool empty() const { return at_.x == left_; }
  int bottom() const { return at_.y; }  // the baseline of the last line

 private:
  static constexpr int kFont = 12, kBetween = 16, kBeside = 6;

  SvgCanvas& canvas_;
  int left_, width_;
  Point at_;
};

}  // namespace annulus
