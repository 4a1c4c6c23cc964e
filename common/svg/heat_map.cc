// See heat_map.h.
#include "common/svg/heat_map.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/error.h"
#include "common/svg/canvas.h"
#include "common/svg/chart_style.h"
#include "common/svg/palette.h"
#include "common/text.h"

namespace annulus {
namespace {

constexpr int kCellHeight = 24, kLeastCellWidth = 34, kMostCellWidth = 90;
constexpr int kCellGap = 1;  // between cells, white
constexpr int kSwatches = 11, kSwatchWidth = 14, kLeastSwatchHeight = 7;

int widest(const std::vector<std::string>& texts) {
  int width = 0;
  for (const std::string& text : texts) width = std::max(width, text_width(text, kChartFont - 1));
  return width;
}

void require_shape(const HeatMap& map) {
  bool good = map.shares.size() == map.rows.size();
  for (const auto& row : map.shares) {
    good = good && row.size() == map.columns.size();
    for (const std::optional<double>& share : row) good = good && (!share || (*share >= 0 && *share <= 1));
  }
  if (good) return;
  throw Error(ErrorKind::kInternal, "svg",
              "a heat map of " + counted(static_cast<int64_t>(map.rows.size()), "row") + " and " +
                  counted(static_cast<int64_t>(map.columns.size()), "column") +
                  " needs a share from 0 to 1, or none, for each cell");
}

class HeatMapDrawing {
 public:
  explicit HeatMapDrawing(const HeatMap& map) : map_(map), cell_texts_(texts_of_cells()) {}

  std::string draw() {
    place();
    for (size_t r = 0; r < map_.rows.size(); ++r) {
      for (size_t c = 0; c < map_.columns.size(); ++c) draw_cell(r, c);
    }
    draw_axes();
    draw_scale();
    return canvas_.print(width_, grid_.bottom() + 38 + kChartMargin);
  }

 private:
  // Percent, with a digit after the point if a cell needs one.
  std::vector<std::vector<std::string>> texts_of_cells() const {
    int digits = 0;
    for (const auto& row : map_.shares) {
      for (const std::optional<double>& share : row) {
        if (share && std::abs(*share * 100 - std::round(*share * 100)) > 1e-6) digits = 1;
      }
    }
    std::vector<std::vector<std::string>> texts;
    for (const auto& row : map_.shares) {
      texts.emplace_back();
      for (const std::optional<double>& share : row) {
        texts.back().push_back(share ? rounded(100 * *share, digits) : "-");
      }
    }
    return texts;
  }

  void place() {
    const int columns = std::max<int>(1, static_cast<int>(map_.columns.size()));
    const bool labelled = widest(map_.rows) > 0;
    grid_.x = kChartMargin + (labelled ? kChartFont + 6 + widest(map_.rows) + 8 : 0);
    const int beside = 16 + kSwatchWidth + 6 + text_width("100", kChartFont - 1) + 8 + kChartFont + kChartMargin;
    int needed = std::max(kLeastCellWidth, widest(map_.columns) + 6);
    for (const auto& row : cell_texts_) needed = std::max(needed, widest(row) + 6);
    const int free = (kChartWidth - grid_.x - beside) / columns;
    cell_width_ = std::max(needed, std::min(free, kMostCellWidth));
    grid_.width = columns * cell_width_;
    width_ = std::max(kChartWidth, grid_.x + grid_.width + beside);
    grid_.y = draw_chart_head(canvas_, map_.title, map_.subtitle, width_);
    grid_.height = std::max<int>(1, static_cast<int>(map_.rows.size())) * kCellHeight;
    scale_height_ = std::max(grid_.height / kSwatches, kLeastSwatchHeight) * kSwatches;
    // A grid of few rows is centred beside the scale.
    scale_y_ = grid_.y;
    if (scale_height_ > grid_.height) grid_.y += (scale_height_ - grid_.height) / 2;
  }

  void draw_cell(size_t r, size_t c) {
    const Box box{grid_.x + static_cast<int>(c) * cell_width_, grid_.y + static_cast<int>(r) * kCellHeight,
                  cell_width_ - kCellGap, kCellHeight - kCellGap};
    const std::optional<double>& share = map_.shares[r][c];
    const std::string color = share ? scale_color(ColorScale::kBlues, *share) : "#ffffff";
    canvas_.box(box, 0, color, share ? "none" : kChartGrid);
    canvas_.text({box.x + box.width / 2, box.y + 16}, cell_texts_[r][c], kChartFont - 1, box.width,
                 text_color_on(color), /*bold=*/false, SvgCanvas::Anchor::kMiddle);
  }

  void draw_axes() {
    if (map_.rows.empty() || map_.columns.empty()) {
      canvas_.text({grid_.x + grid_.width / 2, grid_.y + 16}, "no data", kChartFont, grid_.width, kFaint,
                   /*bold=*/false, SvgCanvas::Anchor::kMiddle);
    }
    for (size_t r = 0; r < map_.rows.size(); ++r) {
      canvas_.text({grid_.x - 7, grid_.y + static_cast<int>(r) * kCellHeight + 16}, map_.rows[r], kChartFont - 1,
                   grid_.x, kInk, /*bold=*/false, SvgCanvas::Anchor::kEnd);
    }
    for (size_t c = 0; c < map_.columns.size(); ++c) {
      canvas_.text({grid_.x + static_cast<int>(c) * cell_width_ + cell_width_ / 2, grid_.bottom() + 16},
                   map_.columns[c], kChartFont - 1, cell_width_, kInk, /*bold=*/false, SvgCanvas::Anchor::kMiddle);
    }
    if (widest(map_.rows) > 0) {
      // A label that is longer than the grid is high may reach up to the title and down to the bottom.
      canvas_.upward_text({kChartMargin + kChartFont - 2, grid_.y + grid_.height / 2}, map_.y_label, kChartFont,
                          grid_.height + 2 * std::min(grid_.y - scale_y_ + 4, 30), kInk);
    }
    // A grid of one row is higher up than the end of the scale, which the label must not reach.
    const int middle = grid_.x + grid_.width / 2;
    canvas_.text({middle, grid_.bottom() + 36}, map_.x_label, kChartFont, std::min(2 * middle, grid_.width + 24), kInk,
                 /*bold=*/false, SvgCanvas::Anchor::kMiddle);
  }

  void draw_scale() {
    const int x = grid_.x + grid_.width + 16, height = scale_height_ / kSwatches;
    for (int i = 0; i < kSwatches; ++i) {
      const double share = static_cast<double>(kSwatches - 1 - i) / (kSwatches - 1);
      const Box box{x, scale_y_ + i * height, kSwatchWidth, height - kCellGap};
      canvas_.box(box, 0, scale_color(ColorScale::kBlues, share), "none");
      if (i % 5 != 0) continue;
      canvas_.text({box.right() + 5, box.y + box.height / 2 + 4}, rounded(100 * share, 0), kChartFont - 1, width_,
                   kInk);
    }
    canvas_.upward_text(
        {x + kSwatchWidth + 5 + text_width("100", kChartFont - 1) + kChartFont + 2, scale_y_ + scale_height_ / 2},
        map_.scale_label + " (%)", kChartFont, scale_height_ + 24, kInk);
  }

  const HeatMap& map_;
  const std::vector<std::vector<std::string>> cell_texts_;
  SvgCanvas canvas_;
  Box grid_;
  int cell_width_ = 0, width_ = 0, scale_y_ = 0, scale_height_ = 0;
};

}  // namespace

std::string heat_map_svg(const HeatMap& map) {
  require_shape(map);
  return HeatMapDrawing(map).draw();
}

}  // namespace annulus
