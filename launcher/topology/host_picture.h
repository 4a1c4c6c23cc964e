// Draws one host of a picture: its frame, packages, NUMA nodes, GPUs, NICs, ranks, and the rings inside it. Used only
// by topology_svg.cc.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/svg/canvas.h"
#include "common/svg/palette.h"
#include "launcher/topology/machine.h"
#include "launcher/topology/placement.h"

namespace annulus {

inline constexpr std::string_view kNicLine = "#a08a3c";
inline constexpr std::string_view kNicFill = "#f5f0e1";
inline constexpr std::string_view kIdle = "#9aa5b1";
inline constexpr std::string_view kToNic = "#b8c2cc";  // from a rank to its NIC

// Returns the color of a rank's ring, or gray without rings.
const Hue& color_of(const Placement& placement, int rank);

// Returns the stroke-dasharray of a link: solid for NVLink and between CPU ranks of one package, dashed for PCI, dotted
// between packages.
std::string_view dash_of(const Link& link);

// Sizes in pixels.
struct Sizes {
  bool words = true;
  int box_width = 92, box_height = 54, nic_height = 38, gap = 10, pad = 10;
  int header = 50;                                    // of a host
  int package_header = 24;                            // of a package
  int node_header = 38;                               // of a NUMA node
  int between = 26;                                   // a rank and its NIC
  int arc_base = 26, arc_slope = 10, arc_most = 130;  // of a hop; slope: in hundredths of the distance

  int arc(int distance) const;
};

// The content of a NUMA node, from left to right.
struct NodeColumn {
  int numa = 0;
  std::vector<int> ranks;  // CPU ranks, as indices into Placement::ranks
  std::vector<int> gpus;
  std::vector<int> nics;  // by slot; -1: an empty slot
  Box box;
};

// Construct it, which determines its width, then move it to its place, then draw it.
class HostPicture {
 public:
  // The references must outlive it. `host` is the index of the host in the placement.
  HostPicture(const Machine& machine, const Placement& placement, const Sizes& sizes, int host);

  int width() const { return width_; }
  int arcs() const;                   // the height of the hops above its ranks
  int height(int arcs) const;         // with `arcs` pixels for those hops
  void move(int x, int y, int arcs);  // by x horizontally, to y vertically
  void draw(SvgCanvas& canvas) const;

  const std::vector<int>& ranks() const { return ranks_; }
  Box rank_box(int rank) const { return anchors_.at(rank); }
  // Returns the NIC where lines from the rank to other hosts begin, or nullopt if it has none.
  std::optional<int> nic_of(int rank) const;
  Box nic_box(int nic) const { return nics_.at(nic); }

 private:
  bool idle_gpus() const { return !on_gpus_ && !machine_.gpus.empty(); }
  std::optional<int> next_here(int rank) const;
  size_t column_of(const std::vector<int>& near, int preferred_id) const;
  void make_columns();
  void place_nics();
  void lay_out();
  std::string summary() const;
  void draw_frames(SvgCanvas& canvas) const;
  void draw_nic_lines(SvgCanvas& canvas) const;
  void draw_arcs(SvgCanvas& canvas) const;
  void draw_gpu(SvgCanvas& canvas, int gpu, const Box& box) const;
  void draw_cpu_rank(SvgCanvas& canvas, int r, const Box& box) const;
  void draw_nic(SvgCanvas& canvas, int index, const Box& box) const;

  const Machine& machine_;
  const Placement& placement_;
  const Sizes& sizes_;
  std::vector<int> ranks_;
  std::map<int, int> rank_of_gpu_;
  bool on_gpus_ = false, has_nics_ = false;
  std::vector<NodeColumn> columns_;
  std::map<int, Box> packages_, anchors_, gpus_, nics_;  // by index; anchors: of ranks, where rings attach
  int width_ = 0;
  Box frame_;
};

}  // namespace annulus
