// Mesh: the ranks of a job as a grid with named axes. For each axis it has the communicator of the ranks that differ
// only along that axis. Training uses it with the axes "data" and "context". Example: "data 2 x context 4" are 8 ranks;
// rank 5 has index 1 along data and 1 along context, and its communicator for context is that of ranks 4 to 7.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"

namespace annulus {

struct MeshAxis {
  std::string name;
  int size = 1;  // one axis may have 0, which stands for all ranks that the others leave
  // Whether the mesh has a communicator of the ranks along this axis. One that nothing uses would hold memory of the
  // device and a thread.
  bool connected = true;
  SplitOptions options = {};  // of that communicator
};

// Returns the axes with their sizes filled in. Throws Error(kPlan) if their product is not `ranks`. The result depends
// only on the arguments, so either every rank throws or none, before anything is sent.
std::vector<MeshAxis> fit_axes(std::vector<MeshAxis> axes, int ranks);

// Returns for example "data 2 x context 4"; an axis whose size is not known yet is "context (all others)".
std::string axes_text(const std::vector<MeshAxis>& axes);

class Mesh {
 public:
  // Collective. `world` must outlive the mesh. The last axis is the innermost: its neighbours are neighbouring ranks,
  // which the launcher places as neighbours in a ring (launcher/topology/placement.h).
  Mesh(Communicator& world, std::vector<MeshAxis> axes);

  Communicator& world() { return world_; }
  // The communicator along an axis. Where the axis has one rank, it is one of the hosts, which has nothing to transfer,
  // also if the world is one of devices. Throws Error(kInternal) if no connected axis has that name.
  Communicator& axis(std::string_view name);
  int size(std::string_view name) const { return axes_[find(name)].size; }
  // This rank's index along the axis, which is also its rank in axis(name).
  int index(std::string_view name) const { return index_[find(name)]; }
  // Advances the transfers of the world and of every connected axis, and raises the errors that they have met.
  void progress();
  std::string text() const { return axes_text(axes_); }

 private:
  size_t find(std::string_view name) const;

  Communicator& world_;
  std::vector<MeshAxis> axes_;
  std::vector<int> index_;
  std::vector<std::shared_ptr<Communicator>> communicators_;  // null for an axis that is not connected
};

}  // namespace annulus
