// See host_picture.h.
#include "launcher/topology/host_picture.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <set>
#include <utility>

#include "common/text.h"

namespace annulus {
namespace {

std::string gibibytes(int64_t bytes) {
  if (bytes >= int64_t{10} << 40) return std::to_string(bytes >> 40) + " TiB";
  return bytes >= int64_t{1} << 30 ? std::to_string(bytes >> 30) + " GiB" : std::to_string(bytes >> 20) + " MiB";
}

std::string speed(int64_t megabits_per_s) {
  if (megabits_per_s < 1000) return std::to_string(megabits_per_s) + " Mb/s";
  return std::to_string(megabits_per_s / 1000) + " Gb/s";
}

}  // namespace

const Hue& color_of(const Placement& placement, int rank) {
  if (placement.hops.empty()) return kHues.back();
  return kHues[static_cast<size_t>(rank / placement.context) % kHues.size()];
}

std::string_view dash_of(const Link& link) {
  if (link.kind == LinkKind::kSystem) return "2 3";
  return link.kind == LinkKind::kNvlink || link.megabytes_per_s == 0 ? "" : "7 3";
}

int Sizes::arc(int distance) const { return std::min(arc_most, arc_base + distance * arc_slope / 100); }

HostPicture::HostPicture(const Machine& machine, const Placement& placement, const Sizes& sizes, int host)
    : machine_(machine), placement_(placement), sizes_(sizes) {
  for (size_t r = 0; r < placement.ranks.size(); ++r) {
    const RankPlacement& rank = placement.ranks[r];
    if (rank.host_index != host) continue;
    ranks_.push_back(static_cast<int>(r));
    if (rank.gpu >= 0) rank_of_gpu_[rank.gpu] = static_cast<int>(r);
  }
  on_gpus_ = !rank_of_gpu_.empty() || (ranks_.empty() && !machine.gpus.empty());
  make_columns();
  lay_out();
}

int HostPicture::arcs() const {
  int most = 0;
  for (int r : ranks_) {
    if (const std::optional<int> to = next_here(r)) {
      most = std::max(most, sizes_.arc(std::abs(anchors_.at(r).x - anchors_.at(*to).x)) * 3 / 4 + 8);
    }
  }
  return most;
}

int HostPicture::height(int arcs) const {
  const int idle = idle_gpus() ? sizes_.box_height + sizes_.gap : 0;
  const int nics = has_nics_ ? sizes_.between + sizes_.nic_height : 0;
  return sizes_.header + sizes_.package_header + sizes_.node_header + idle + arcs + sizes_.box_height + nics +
         3 * sizes_.pad;
}

void HostPicture::move(int x, int y, int arcs) {
  const int top = y + sizes_.header + sizes_.package_header + sizes_.node_header;
  const int idle = idle_gpus() ? sizes_.box_height + sizes_.gap : 0;
  const int anchor_y = top + idle + arcs;
  const int nic_y = anchor_y + sizes_.box_height + sizes_.between;
  frame_ = {frame_.x + x, y, width_, height(arcs)};
  for (auto& [id, box] : packages_) {
    box.x += x;
    box.y = y + sizes_.header;
    box.height = frame_.bottom() - sizes_.pad - box.y;
  }
  for (NodeColumn& column : columns_) {
    column.box.x += x;
    column.box.y = y + sizes_.header + sizes_.package_header;
    column.box.height = frame_.bottom() - 2 * sizes_.pad - column.box.y;
  }
  for (auto& [rank, box] : anchors_) box = {box.x + x, anchor_y, box.width, box.height};
  for (auto& [gpu, box] : gpus_) box = {box.x + x, idle_gpus() ? top : anchor_y, box.width, box.height};
  for (auto& [nic, box] : nics_) box = {box.x + x, nic_y, box.width, box.height};
}

void HostPicture::draw(SvgCanvas& canvas) const {
  draw_frames(canvas);
  draw_nic_lines(canvas);
  draw_arcs(canvas);
  for (const auto& [gpu, box] : gpus_) draw_gpu(canvas, gpu, box);
  if (!on_gpus_) {
    for (const auto& [rank, box] : anchors_) draw_cpu_rank(canvas, rank, box);
  }
  for (const auto& [nic, box] : nics_) draw_nic(canvas, nic, box);
}

std::optional<int> HostPicture::nic_of(int rank) const {
  const int nic = placement_.ranks[rank].nic;
  return nic < 0 ? std::nullopt : std::optional<int>(nic);
}

std::optional<int> HostPicture::next_here(int rank) const {
  if (placement_.hops.empty()) return std::nullopt;
  const Hop& hop = placement_.hops[rank];
  return hop.other_host ? std::nullopt : std::optional<int>(hop.to);
}

// Returns the column of a device: that of the node with id `preferred_id` (a GPU's rank's) if it is near the device,
// otherwise that of the first near node.
size_t HostPicture::column_of(const std::vector<int>& near, int preferred_id) const {
  size_t best = 0;
  bool found = false;
  for (size_t c = 0; c < columns_.size(); ++c) {
    if (std::find(near.begin(), near.end(), columns_[c].numa) == near.end()) continue;
    const bool preferred = machine_.numa_nodes[columns_[c].numa].id == preferred_id;
    if (!found || preferred) best = c;
    found = true;
  }
  return best;
}

void HostPicture::make_columns() {
  std::set<int> shown;
  for (const Core& core : machine_.cores) shown.insert(core.numa);
  for (const Gpu& gpu : machine_.gpus) {
    if (std::none_of(gpu.numa.begin(), gpu.numa.end(), [&](int n) { return shown.contains(n); })) {
      shown.insert(gpu.numa.front());
    }
  }
  for (int numa : shown) columns_.push_back({numa, {}, {}, {}, {}});
  for (size_t g = 0; g < machine_.gpus.size(); ++g) {
    const auto rank = rank_of_gpu_.find(static_cast<int>(g));
    const int id = rank == rank_of_gpu_.end() ? -1 : placement_.ranks[rank->second].numa_node;
    columns_[column_of(machine_.gpus[g].numa, id)].gpus.push_back(static_cast<int>(g));
  }
  for (int r : ranks_) {
    const int id = placement_.ranks[r].numa_node;
    for (NodeColumn& column : columns_) {
      if (!on_gpus_ && machine_.numa_nodes[column.numa].id == id) column.ranks.push_back(r);
    }
  }
  place_nics();
}

// A NIC is placed below the GPU or CPU rank that uses it if that slot is free; the other NICs fill the free slots from
// the left.
void HostPicture::place_nics() {
  std::map<int, int> user;  // NIC -> rank
  for (int r : ranks_) {
    if (const auto nic = nic_of(r)) user.emplace(*nic, r);
  }
  std::vector<std::vector<int>> later(columns_.size());
  for (size_t n = 0; n < machine_.nics.size(); ++n) {
    NodeColumn& column = columns_[column_of(machine_.nics[n].numa, -1)];
    const auto rank = user.find(static_cast<int>(n));
    const std::vector<int>& row = on_gpus_ ? column.gpus : column.ranks;
    size_t slot = row.size();
    for (size_t s = 0; s < row.size() && rank != user.end(); ++s) {
      const auto own = rank_of_gpu_.find(row[s]);
      if (on_gpus_ ? own != rank_of_gpu_.end() && own->second == rank->second : row[s] == rank->second) slot = s;
    }
    column.nics.resize(std::max(column.nics.size(), slot < row.size() ? slot + 1 : 0), -1);
    if (slot < row.size() && column.nics[slot] < 0) {
      column.nics[slot] = static_cast<int>(n);
    } else {
      later[&column - columns_.data()].push_back(static_cast<int>(n));
    }
  }
  for (size_t c = 0; c < columns_.size(); ++c) {
    for (int nic : later[c]) {
      auto free = std::find(columns_[c].nics.begin(), columns_[c].nics.end(), -1);
      if (free == columns_[c].nics.end()) free = columns_[c].nics.insert(free, -1);
      *free = nic;
    }
  }
  has_nics_ = !machine_.nics.empty();
}

// Sets the x coordinates of everything, relative to the host's left edge.
void HostPicture::lay_out() {
  int x = sizes_.pad;
  const int step = sizes_.box_width + sizes_.gap;
  int package = -1;
  for (NodeColumn& column : columns_) {
    const int owner = machine_.numa_nodes[column.numa].package;
    if (owner != package) {
      if (package >= 0) x += sizes_.pad + sizes_.gap;  // the end of the package before
      package = owner;
      packages_[package] = {x, 0, 0, 0};
      x += sizes_.pad;
    } else {
      x += sizes_.gap;
    }
    const int idle = on_gpus_ ? 0 : static_cast<int>(column.gpus.size());
    const int row = static_cast<int>(on_gpus_ ? column.gpus.size() : column.ranks.size());
    const int slots = std::max({row, idle, static_cast<int>(column.nics.size()), 1});
    column.box = {x, 0, std::max(slots * step - sizes_.gap + 2 * sizes_.pad, sizes_.words ? 150 : 60), 0};
    const int first = x + (column.box.width - slots * step + sizes_.gap) / 2;
    const auto slot_box = [&](size_t slot, int height) {
      return Box{first + static_cast<int>(slot) * step, 0, sizes_.box_width, height};
    };
    for (size_t s = 0; s < column.gpus.size(); ++s) {
      gpus_[column.gpus[s]] = slot_box(s, sizes_.box_height);
      const auto rank = rank_of_gpu_.find(column.gpus[s]);
      if (rank != rank_of_gpu_.end()) anchors_[rank->second] = slot_box(s, sizes_.box_height);
    }
    for (size_t s = 0; s < column.ranks.size(); ++s) anchors_[column.ranks[s]] = slot_box(s, sizes_.box_height);
    for (size_t s = 0; s < column.nics.size(); ++s) {
      if (column.nics[s] >= 0) nics_[column.nics[s]] = slot_box(s, sizes_.nic_height);
    }
    x = column.box.right();
    packages_[package].width = x + sizes_.pad - packages_[package].x;
  }
  width_ = x + 2 * sizes_.pad;
}

void HostPicture::draw_frames(SvgCanvas& canvas) const {
  canvas.box(frame_, 10, "#f7f9fb", "#7b8794");
  const Point title{frame_.x + 2 * sizes_.pad, frame_.y + (sizes_.words ? 22 : 16)};
  const int room = frame_.width - 4 * sizes_.pad;
  canvas.text(title, machine_.host, sizes_.words ? 17 : 12, room, kInk, /*bold=*/true);
  if (sizes_.words) canvas.text({title.x, title.y + 18}, summary(), 12, room, kFaint);
  for (const auto& [index, box] : packages_) {
    canvas.box(box, 7, "#e9eef3", "#b8c2cc");
    const Package& package = machine_.packages[index];
    std::string text = "package " + std::to_string(package.id);
    if (sizes_.words && !package.model.empty()) text += ": " + package.model;
    canvas.text({box.x + sizes_.pad, box.y + (sizes_.words ? 17 : 12)}, text, sizes_.words ? 12 : 10,
                box.width - 2 * sizes_.pad, kInk);
  }
  for (const NodeColumn& column : columns_) {
    canvas.box(column.box, 5, "#ffffff", "#cbd2d9");
    const NumaNode& node = machine_.numa_nodes[column.numa];
    const auto cores = std::count_if(machine_.cores.begin(), machine_.cores.end(),
                                     [&](const Core& core) { return core.numa == column.numa; });
    const int left = column.box.x + sizes_.pad, width = column.box.width - 2 * sizes_.pad;
    const std::string name = "NUMA " + std::to_string(node.id);
    const std::string has = counted(cores, "core") + (sizes_.words ? ", " + gibibytes(node.memory_bytes) : "");
    if (sizes_.words) {
      canvas.text({left, column.box.y + 16}, name, 12, width, kInk);
      canvas.text({left, column.box.y + 31}, has, 11, width, kFaint);
    } else {
      const std::string both = name + ", " + has;
      canvas.text({left, column.box.y + 11}, text_width(both, 9) <= width ? both : name, 9, width, kFaint);
    }
  }
}

std::string HostPicture::summary() const {
  std::string text = counted(machine_.cores.size(), "core");
  std::map<std::string, int> models;
  for (const Gpu& gpu : machine_.gpus) ++models[gpu.model];
  for (const auto& [model, count] : models) text += ", " + std::to_string(count) + " x " + model;
  int64_t most = 0;
  for (const auto& row : machine_.links) {
    for (const Link& link : row) {
      if (link.kind == LinkKind::kNvlink) most = std::max(most, link.megabytes_per_s);
    }
  }
  if (most > 0) text += ", NVLink " + std::to_string(most / 1000) + " GB/s";
  if (machine_.nvswitches > 0) text += " through " + counted(machine_.nvswitches, "NVSwitch");
  return text;
}

void HostPicture::draw_nic_lines(SvgCanvas& canvas) const {
  for (int r : ranks_) {
    const auto nic = nic_of(r);
    if (!nic) continue;
    canvas.line(straight(anchors_.at(r).bottom_middle(), nics_.at(*nic).top_middle()), kToNic, sizes_.words ? 2 : 1, "",
                /*arrow=*/false);
  }
}

// Arcs run above the ranks. They leave a rank to the right of its middle and arrive to the left of it, so that the two
// do not meet.
void HostPicture::draw_arcs(SvgCanvas& canvas) const {
  const int aside = sizes_.box_width / 8;
  for (int r : ranks_) {
    const std::optional<int> to = next_here(r);
    if (!to) continue;
    const Point a = anchors_.at(r).top_middle(), b = anchors_.at(*to).top_middle();
    const int up = a.y - sizes_.arc(std::abs(a.x - b.x));
    const std::string path = "M" + std::to_string(a.x + aside) + " " + std::to_string(a.y) + "C" +
                             std::to_string(a.x + aside) + " " + std::to_string(up) + " " +
                             std::to_string(b.x - aside) + " " + std::to_string(up) + " " +
                             std::to_string(b.x - aside) + " " + std::to_string(b.y - 1);
    canvas.line(path, color_of(placement_, r).line, sizes_.words ? 2 : 1, dash_of(placement_.hops[r].link),
                /*arrow=*/true);
  }
}

void HostPicture::draw_gpu(SvgCanvas& canvas, int gpu, const Box& box) const {
  const auto rank = rank_of_gpu_.find(gpu);
  const bool used = rank != rank_of_gpu_.end();
  const Hue ring = used ? color_of(placement_, rank->second) : Hue{kIdle, "#ffffff"};
  canvas.box(box, 5, ring.tint, ring.line);
  const Point middle = box.top_middle();
  const std::string name = "GPU" + std::to_string(gpu);
  if (!sizes_.words) {
    canvas.text({middle.x, middle.y + 16}, used ? std::to_string(rank->second) : "-", 11, box.width - 4,
                used ? kInk : kIdle, used, SvgCanvas::Anchor::kMiddle);
    return;
  }
  canvas.text({middle.x, middle.y + 17}, used ? "rank " + std::to_string(rank->second) : name, 14, box.width - 6,
              used ? kInk : kFaint, used, SvgCanvas::Anchor::kMiddle);
  canvas.text({middle.x, middle.y + 32}, used ? name : "no rank", 11, box.width - 6, kFaint, false,
              SvgCanvas::Anchor::kMiddle);
  canvas.text({middle.x, middle.y + 46}, machine_.gpus[gpu].pci, 10, box.width - 6, kFaint, false,
              SvgCanvas::Anchor::kMiddle);
}

void HostPicture::draw_cpu_rank(SvgCanvas& canvas, int r, const Box& box) const {
  const RankPlacement& rank = placement_.ranks[r];
  const Hue& ring = color_of(placement_, r);
  canvas.box(box, 5, ring.tint, ring.line);
  const Point middle = box.top_middle();
  canvas.text({middle.x, middle.y + (sizes_.words ? 21 : 16)}, (sizes_.words ? "rank " : "") + std::to_string(r),
              sizes_.words ? 14 : 11, box.width - 4, kInk, true, SvgCanvas::Anchor::kMiddle);
  if (!sizes_.words) return;
  canvas.text({middle.x, middle.y + 40}, rank.oversubscribed ? "shares a core" : counted(rank.cores, "core"), 11,
              box.width - 6, kFaint, false, SvgCanvas::Anchor::kMiddle);
}

void HostPicture::draw_nic(SvgCanvas& canvas, int index, const Box& box) const {
  const Nic& nic = machine_.nics[index];
  canvas.box(box, 4, nic.active ? kNicFill : "#ffffff", nic.active ? kNicLine : kIdle);
  if (!sizes_.words) return;
  const Point middle = box.top_middle();
  std::string more = nic.rdma ? nic.interface : "";
  for (const RdmaPort& port : nic.ports) {
    if (port.number == nic.port && port.megabits_per_s > 0) {
      more += (more.empty() ? "" : ", ") + speed(port.megabits_per_s);
    }
  }
  if (!nic.active) more = "no port up";
  canvas.text({middle.x, middle.y + 16}, nic.name, 12, box.width - 6, nic.active ? kInk : kFaint, false,
              SvgCanvas::Anchor::kMiddle);
  canvas.text({middle.x, middle.y + 30}, more.empty() ? (nic.rdma ? "RDMA" : "network") : more, 10, box.width - 6,
              kFaint, false, SvgCanvas::Anchor::kMiddle);
}

}  // namespace annulus
