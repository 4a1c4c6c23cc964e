// See topology_svg.h.
#include "launcher/topology/topology_svg.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "common/svg/canvas.h"
#include "common/text.h"
#include "launcher/topology/host_picture.h"
#include "launcher/topology/lanes.h"

namespace annulus {
namespace {

constexpr size_t kLargeHosts = 4;
constexpr size_t kHosts = 64;
constexpr int kPageWidth = 1900;  // the most that a row of several hosts is wide
constexpr int kMargin = 24;
constexpr int kTop = 64;  // the height of the title
constexpr int kBetweenRows = 22, kBetweenHosts = 22;
constexpr int kLegendLine = 24;
constexpr size_t kNamedRings = 8;

constexpr Sizes kLarge;
constexpr Sizes kSmall{false, 32, 24, 11, 5, 6, 24, 17, 14, 10, 14, 7, 44};

struct Kind {
  std::string_view dash, text;
  bool through_memory;
};
constexpr std::array<Kind, 5> kKinds = {{{"", "NVLink", false},
                                         {"7 3", "PCI", false},
                                         {"2 3", "PCI, across packages", false},
                                         {"", "through memory", true},
                                         {"2 3", "through memory, across packages", true}}};

class Page {
 public:
  Page(const std::vector<Machine>& hosts, const Placement& placement)
      : hosts_(hosts), placement_(placement), sizes_(hosts.size() <= kLargeHosts ? kLarge : kSmall) {
    for (size_t h = 0; h < std::min(hosts.size(), kHosts); ++h) {
      pictures_.emplace_back(hosts[h], placement, sizes_, static_cast<int>(h));
    }
  }

  std::string draw() {
    make_rows();
    make_routes();
    place();
    draw_title();
    for (const HostPicture& picture : pictures_) picture.draw(canvas_);
    draw_routes();
    const int height = draw_legend(bottom_ + 14);
    return canvas_.print(kMargin * 2 + inner_width_ + router_->left_width() + router_->right_width(), height);
  }

 private:
  // Puts hosts side by side while they fit. x counts from the left edge of the rows.
  void make_rows() {
    int x = 0;
    for (HostPicture& picture : pictures_) {
      arcs_ = std::max(arcs_, picture.arcs());
      if (x > 0 && x + picture.width() > kPageWidth) {
        ++rows_;
        x = 0;
      }
      row_of_.push_back(rows_);
      picture.move(x, 0, 0);
      x += picture.width() + kBetweenHosts;
      inner_width_ = std::max(inner_width_, x - kBetweenHosts);
    }
    ++rows_;
    inner_width_ = std::max(inner_width_, 760);  // for the legend
  }

  // Returns the host and the box at which a rank's lines to other hosts end: a NIC, which may serve several ranks, or
  // the rank itself (-1 - rank).
  std::pair<int, int> port_of(int rank) const {
    const int host = placement_.ranks[rank].host_index;
    const auto nic = pictures_[host].nic_of(rank);
    return {host, nic ? *nic : -1 - rank};
  }

  Box box_of(const std::pair<int, int>& port) const {
    const HostPicture& picture = pictures_[port.first];
    return port.second < 0 ? picture.rank_box(-1 - port.second) : picture.nic_box(port.second);
  }

  void make_routes() {
    router_.emplace(rows_);
    std::map<std::pair<int, int>, int> ends;
    for (const Hop& hop : placement_.hops) {
      if (!hop.other_host || host_of(hop.from) >= pictures_.size() || host_of(hop.to) >= pictures_.size()) continue;
      drawn_.push_back(hop);
      ++ends[port_of(hop.from)];
      ++ends[port_of(hop.to)];
    }
    std::map<std::pair<int, int>, int> taken;
    const auto end_x = [&](int rank) {
      const auto port = port_of(rank);
      const Box box = box_of(port);
      return box.x + box.width * ++taken[port] / (ends[port] + 1);
    };
    for (const Hop& hop : drawn_) {
      Route route;
      route.to_x = end_x(hop.to);
      route.from_x = end_x(hop.from);
      route.from_row = row_of_[host_of(hop.from)];
      route.to_row = row_of_[host_of(hop.to)];
      router_->add(route, inner_width_);
    }
  }

  size_t host_of(int rank) const { return static_cast<size_t>(placement_.ranks[rank].host_index); }

  void place() {
    left_ = kMargin + router_->left_width();
    int y = kTop;
    for (int row = 0; row < rows_; ++row) {
      int height = 0;
      for (size_t h = 0; h < pictures_.size(); ++h) {
        if (row_of_[h] != row) continue;
        height = std::max(height, pictures_[h].height(arcs_));
        pictures_[h].move(left_, y, arcs_);
      }
      band_tops_.push_back(y + height + 2);
      y = band_tops_.back() + router_->band_height(row) + kBetweenRows;
    }
    bottom_ = y - kBetweenRows;
  }

  void draw_title() {
    const size_t ranks = placement_.ranks.size();
    std::string text = counted(hosts_.size(), "host") + ", " + counted(ranks, "rank") +
                       (placement_.ranks.front().gpu >= 0 ? " on GPUs" : " on processors");
    if (!placement_.hops.empty()) {
      text += ", " + counted(static_cast<int64_t>(ranks) / placement_.context, "ring") + " of " +
              std::to_string(placement_.context);
    }
    canvas_.text({left_, 36}, text, 20, inner_width_, kInk, /*bold=*/true);
    if (hosts_.size() > pictures_.size()) {
      canvas_.text({left_, 55}, "the first " + std::to_string(pictures_.size()) + " hosts are drawn", 12, inner_width_,
                   kFaint);
    }
  }

  void draw_routes() {
    for (int row = 0; row < rows_; ++row) {
      const int height = router_->band_height(row);
      if (height > 0) canvas_.box({left_, band_tops_[row], inner_width_, height}, 4, "#eef1f4", "#eef1f4");
    }
    for (size_t i = 0; i < drawn_.size(); ++i) {
      const Hop& hop = drawn_[i];
      const RingColor& color = color_of(placement_, hop.from);
      for (int rank : {hop.from, hop.to}) {
        if (port_of(rank).second < 0) continue;
        const Point a = pictures_[host_of(rank)].rank_box(rank).bottom_middle();
        const Point b = box_of(port_of(rank)).top_middle();
        canvas_.line(straight(a, b), color.line, 2, "", /*arrow=*/false);
      }
      canvas_.line(router_->path(i, box_of(port_of(hop.from)).bottom(), box_of(port_of(hop.to)).bottom(), band_tops_,
                                 left_, left_ + inner_width_),
                   color.line, 2, "", /*arrow=*/true);
    }
  }

  // Returns the height of the page.
  int draw_legend(int y) {
    int x = left_;
    y += kLegendLine;
    const auto item = [&](const std::string& text, auto sample) {
      const int width = 44 + text_width(text, 12) + 26;
      if (x > left_ && x + width > left_ + inner_width_) {
        x = left_;
        y += kLegendLine;
      }
      sample(x, y - 4);
      canvas_.text({x + 44, y}, text, 12, width, kInk);
      x += width;
    };
    const auto stroke = [&](std::string_view color, std::string_view dash) {
      return [this, color, dash](int at, int middle) {
        canvas_.line("M" + std::to_string(at) + " " + std::to_string(middle) + "H" + std::to_string(at + 36), color, 2,
                     dash, /*arrow=*/true);
      };
    };
    const int context = placement_.context;
    const size_t rings = placement_.hops.empty() ? 0 : placement_.ranks.size() / static_cast<size_t>(context);
    for (size_t ring = 0; ring < std::min(rings, kNamedRings); ++ring) {
      const int first = static_cast<int>(ring) * context;
      item("ring " + std::to_string(ring) + ": ranks " + std::to_string(first) + " to " +
               std::to_string(first + context - 1),
           stroke(color_of(placement_, first).line, ""));
    }
    if (rings > kNamedRings) {
      item("and " + counted(rings - kNamedRings, "more ring") + ", in the same colours again", [](int, int) {});
    }
    for (const auto& [dash, text, through_memory] : kKinds) {
      const bool any = std::any_of(placement_.hops.begin(), placement_.hops.end(), [&](const Hop& hop) {
        return !hop.other_host && dash_of(hop.link) == dash && (hop.link.megabytes_per_s == 0) == through_memory;
      });
      if (any) item(std::string(text), stroke("#5c6670", dash));
    }
    if (!drawn_.empty()) item("below the hosts: the network", stroke("#5c6670", ""));
    std::set<bool> up;
    for (const Machine& machine : hosts_) {
      for (const Nic& nic : machine.nics) up.insert(nic.active);
    }
    for (const bool active : up) {
      item(active ? "a NIC" : "a NIC without a port that is up", [&](int at, int middle) {
        canvas_.box({at + 4, middle - 6, 28, 12}, 3, active ? kNicFill : "#ffffff", active ? kNicLine : kIdle);
      });
    }
    return y + kMargin;
  }

  const std::vector<Machine>& hosts_;
  const Placement& placement_;
  const Sizes& sizes_;
  std::vector<HostPicture> pictures_;
  std::vector<int> row_of_;  // by host
  std::vector<Hop> drawn_;   // the hops between hosts
  std::optional<Router> router_;
  std::vector<int> band_tops_;
  int rows_ = 0, arcs_ = 0, inner_width_ = 0, left_ = 0, bottom_ = 0;
  SvgCanvas canvas_;
};

}  // namespace

std::string topology_svg(const std::vector<Machine>& hosts, const Placement& placement) {
  return Page(hosts, placement).draw();
}

}  // namespace annulus
