// See mesh.h.
#include "runtime/training/mesh.h"

#include <utility>

#include "common/error.h"
#include "common/text.h"

namespace annulus {

std::string axes_text(const std::vector<MeshAxis>& axes) {
  std::string out;
  for (const MeshAxis& axis : axes) {
    const std::string size = axis.size == 0 ? "(all others)" : std::to_string(axis.size);
    out += (out.empty() ? "" : " x ") + axis.name + " " + size;
  }
  return out;
}

std::vector<MeshAxis> fit_axes(std::vector<MeshAxis> axes, int ranks) {
  int64_t product = 1;
  MeshAxis* rest = nullptr;
  const std::string text = axes_text(axes);
  for (MeshAxis& axis : axes) {
    if (axis.size < 0 || (axis.size == 0 && rest != nullptr)) {
      throw Error(ErrorKind::kPlan, "mesh",
                  "expected positive axis sizes, of which one may be 0 (all other ranks), got the mesh " + text);
    }
    if (axis.size == 0) {
      rest = &axis;
    } else {
      product *= axis.size;
    }
  }
  if (rest != nullptr && product <= ranks && ranks % product == 0) {
    rest->size = static_cast<int>(ranks / product);
    product = ranks;
  }
  if (product != ranks) {
    throw Error(ErrorKind::kPlan, "mesh",
                "the mesh " + text + " needs " + (rest != nullptr ? "a multiple of " : "") + counted(product, "rank") +
                    ", but " + std::to_string(ranks) + (ranks == 1 ? " was" : " were") + " started: use -n " +
                    std::to_string(product) + ", or change [mesh]");
  }
  return axes;
}

Mesh::Mesh(Communicator& world, std::vector<MeshAxis> axes)
    : world_(world), axes_(fit_axes(std::move(axes), world.size())) {
  int inner = 1;
  index_.resize(axes_.size());
  for (size_t i = axes_.size(); i-- > 0;) {
    index_[i] = world.rank() / inner % axes_[i].size;
    inner *= axes_[i].size;
  }
  inner = 1;
  communicators_.resize(axes_.size());
  for (size_t i = axes_.size(); i-- > 0;) {
    if (axes_[i].connected) {
      Communicator& whole = axes_[i].size > 1 ? world : world.host();
      // The color is the lowest rank of this rank's line along the axis.
      communicators_[i] = whole.split(world.rank() - index_[i] * inner, index_[i], axes_[i].options);
      communicators_[i]->set_timeout(world.timeout());
    }
    inner *= axes_[i].size;
  }
}

size_t Mesh::find(std::string_view name) const {
  for (size_t i = 0; i < axes_.size(); ++i) {
    if (axes_[i].name == name) return i;
  }
  throw Error(ErrorKind::kInternal, "mesh", "there is no axis " + std::string(name) + " in the mesh " + text());
}

Communicator& Mesh::axis(std::string_view name) {
  const std::shared_ptr<Communicator>& communicator = communicators_[find(name)];
  if (communicator) return *communicator;
  throw Error(ErrorKind::kInternal, "mesh",
              "the ranks along the axis " + std::string(name) + " have no communicator: connect the axis");
}

void Mesh::progress() {
  world_.progress();
  for (const std::shared_ptr<Communicator>& communicator : communicators_) {
    if (communicator) communicator->progress();
  }
}

}  // namespace annulus
