// Mesh: the ranks of a job as a grid with named axes. Code asks for an axis by name and gets the communicator of the
// ranks that differ in that axis alone. Used by trainer.cc; axes now are "data" and "context".
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"

namespace annulus {

struct MeshAxis {
  std::string name;
  int size = 1;  // 0, for one axis at most: all ranks that the others leave
};

// The axes with their sizes filled in. Error(kPlan) when they do not multiply to `ranks`. Depends on its arguments
// alone: every rank raises alike, before anything is sent.
std::vector<MeshAxis> fit_axes(std::vector<MeshAxis> axes, int ranks);

// "data 2 x context 4"; of an axis whose size is not known yet, "context (all others)".
std::string axes_text(const std::vector<MeshAxis>& axes);

class Mesh {
 public:
  // The last axis is the innermost: its neighbours are neighbouring ranks, which the launcher places as neighbours in a
  // ring (topology/placement.h). Collective. `world` must outlive the mesh.
  Mesh(Communicator& world, std::vector<MeshAxis> axes);

  Communicator& world() { return world_; }
  // Error(kInternal) for a name that is no axis.
  Communicator& axis(std::string_view name);
  int size(std::string_view name) const { return axes_[find(name)].size; }
  // This rank's place along the axis: also its rank in axis(name).
  int index(std::string_view name) const { return index_[find(name)]; }
  // Of the world and of every axis: moves transfers along, and raises what one of them has met.
  void progress();
  std::string text() const { return axes_text(axes_); }

 private:
  size_t find(std::string_view name) const;

  Communicator& world_;
  std::vector<MeshAxis> axes_;
  std::vector<int> index_;
  std::vector<std::shared_ptr<Communicator>> communicators_;
};

}  // namespace annulus
