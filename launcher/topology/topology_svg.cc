// See topology_svg.h.
#include "launcher/topology/topology_svg.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "common/svg/canvas.h"
#include "common/svg/legend.h"
#include "common/svg/palette.h"
#include "common/text.h"
#include "launcher/topology/host_picture.h"
#include "launcher/topology/lanes.h"

namespace annulus {
namespace {

constexpr size_t kLargeHosts = 4;
constexpr size_t kHosts = 64;
// The most that a row of several hosts is wide: on a page of a document letters stay readable. Of many hosts, which are
// drawn small, a picture would be far higher than wide.
constexpr int kPageWidth = 1000, kWidePage = 1900;
constexpr size_t kHostsOfWidePage = 16;
constexpr int kLeastWidth = 420;  // for the legend
constexpr int kTitleSize = 20;
constexpr int kMargin = 24;
constexpr int kTop = 64;  // the height of the title
constexpr int kBetweenRows = 22, kBetweenHosts = 22;
constexpr int kLegendTop = 24;
constexpr size_t kNamedRings = 8;

constexpr Sizes kLarge;
constexpr Sizes kSmall{false, 32, 24, 11, 5, 6, 24, 17, 14, 10, 14, 7, 44};

// What a line of a dash stands for. A NIC's ranks reach other hosts by solid lines below the hosts.
constexpr std::array<std::string_view, 3> kDashes = {"", "7 3", "2 3"};

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
  // Puts hosts side by side while they fit on the page, in rows of as many each, so that no row is nearly empty. x
  // counts from the left edge of the rows.
  void make_rows() {
    const int page = pictures_.size() > kHostsOfWidePage ? kWidePage : kPageWidth;
    int widest = 1;
    for (const HostPicture& picture : pictures_) widest = std::max(widest, picture.width());
    const auto count = static_cast<int>(pictures_.size());
    const int fitting = std::max(1, (page + kBetweenHosts) / (widest + kBetweenHosts));
    const int rows = (count + fitting - 1) / fitting, in_a_row = (count + rows - 1) / rows;
    int x = 0, in_this_row = 0;
    for (HostPicture& picture : pictures_) {
      arcs_ = std::max(arcs_, picture.arcs());
      if (in_this_row++ == in_a_row) {
        ++rows_;
        x = 0;
        in_this_row = 1;
      }
      row_of_.push_back(rows_);
      picture.move(x, 0, 0);
      x += picture.width() + kBetweenHosts;
      inner_width_ = std::max(inner_width_, x - kBetweenHosts);
    }
    ++rows_;
    inner_width_ = std::max({inner_width_, kLeastWidth, text_width(title(), kTitleSize) * 20 / 19 + 1});  // it is bold
    // In the middle, where a row is narrower than the page.
    for (size_t first = 0; first < pictures_.size(); first += static_cast<size_t>(in_a_row)) {
      const size_t past = std::min(pictures_.size(), first + static_cast<size_t>(in_a_row));
      int width = -kBetweenHosts;
      for (size_t h = first; h < past; ++h) width += pictures_[h].width() + kBetweenHosts;
      for (size_t h = first; h < past; ++h) pictures_[h].move((inner_width_ - width) / 2, 0, 0);
    }
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

  std::string title() const {
    const size_t ranks = placement_.ranks.size();
    std::string text = counted(hosts_.size(), "host") + ", " + counted(ranks, "rank") +
                       (placement_.ranks.front().gpu >= 0 ? " on GPUs" : " on processors");
    if (!placement_.hops.empty()) {
      text += ", " + counted(static_cast<int64_t>(ranks) / placement_.context, "ring") + " of " +
              std::to_string(placement_.context);
    }
    return text;
  }

  // In words, for those who cannot see the picture.
  std::string description() const {
    std::string text;
    for (const HostPicture& picture : pictures_) {
      const size_t h = static_cast<size_t>(&picture - pictures_.data());
      const std::vector<int>& ranks = picture.ranks();
      text += "Host " + std::to_string(h) + ", " + hosts_[h].host + ", has " +
              (ranks.empty() ? "no rank" : (ranks.size() == 1 ? "rank " : "ranks ") + ranges_text(ranks)) + ". ";
    }
    if (placement_.hops.empty()) return text;
    const auto between =
        std::count_if(placement_.hops.begin(), placement_.hops.end(), [](const Hop& hop) { return hop.other_host; });
    return text + "Each rank sends to the next of its ring; " + counted(between, "hop") + " of " +
           std::to_string(placement_.hops.size()) + " cross the network.";
  }

  void draw_title() {
    canvas_.text({left_, 36}, title(), kTitleSize, inner_width_, kInk, /*bold=*/true);
    canvas_.describe(title(), description());
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
      const Hue& color = color_of(placement_, hop.from);
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

  // What lines of this dash mean in this picture; empty: there are none.
  std::string meaning_of(std::string_view dash) const {
    std::set<std::string> inside;
    for (const Hop& hop : placement_.hops) {
      if (hop.other_host || dash_of(hop.link) != dash || host_of(hop.from) >= pictures_.size()) continue;
      const bool far = hop.link.kind == LinkKind::kSystem;
      const bool memory = hop.link.megabytes_per_s == 0;
      inside.insert(std::string(memory                               ? "through memory"
                                : hop.link.kind == LinkKind::kNvlink ? "NVLink"
                                                                     : "PCI") +
                    (far ? ", across packages" : ""));
    }
    std::vector<std::string> meanings(inside.begin(), inside.end());
    if (dash.empty() && !drawn_.empty()) meanings.push_back("below the hosts the network");
    return join(meanings, "; ");
  }

  // Returns the height of the page.
  int draw_legend(int y) {
    Legend legend(canvas_, {left_, y + kLegendTop}, inner_width_);
    const int context = placement_.context;
    const size_t rings = placement_.hops.empty() ? 0 : placement_.ranks.size() / static_cast<size_t>(context);
    for (size_t ring = 0; ring < std::min(rings, kNamedRings); ++ring) {
      const int first = static_cast<int>(ring) * context;
      const Hue& color = color_of(placement_, first);
      legend.swatch("ring " + std::to_string(ring) + ": ranks " + std::to_string(first) + " to " +
                        std::to_string(first + context - 1),
                    color.tint, color.line);
    }
    if (rings > kNamedRings) {
      legend.words("and " + counted(static_cast<int64_t>(rings - kNamedRings), "more ring") +
                   ", in the same colours again");
    }
    for (const std::string_view dash : kDashes) {
      const std::string meaning = meaning_of(dash);
      if (!meaning.empty()) legend.stroke(meaning, kHues.back().line, dash, /*arrow=*/true);
    }
    bool uses = false;
    std::set<bool> up;
    for (size_t h = 0; h < pictures_.size(); ++h) {
      for (const Nic& nic : hosts_[h].nics) up.insert(nic.active);
      for (const int rank : pictures_[h].ranks()) uses = uses || pictures_[h].nic_of(rank);
    }
    for (const bool active : up) {
      legend.swatch(active ? "a NIC" : "a NIC without a port that is up", active ? kNicFill : "#ffffff",
                    active ? kNicLine : kIdle);
    }
    if (uses) legend.stroke("from a rank to the NIC that it uses", kToNic, "", /*arrow=*/false);
    return legend.bottom() + kMargin;
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
