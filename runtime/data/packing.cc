// See packing.h.
#include "runtime/data/packing.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "common/error.h"
#include "common/text.h"

namespace annulus {

std::string_view packing_name(Packing packing) {
  constexpr std::string_view kNames[] = {"stream", "best-fit", "document"};
  return kNames[static_cast<size_t>(packing)];
}

Packing packing_named(std::string_view name) {
  for (const Packing packing : {Packing::kStream, Packing::kBestFit, Packing::kDocument}) {
    if (packing_name(packing) == name) return packing;
  }
  throw Error(ErrorKind::kInternal, "data", "there is no packing " + std::string(name));
}

std::string PackSettings::text() const {
  return "context=" + std::to_string(context) + " packing=" + std::string(packing_name(packing)) +
         " documents=" + (units_are_documents() ? "1" : "0") + " validation=" + exact(validation_fraction) +
         " refuse_long=" + (refuse_long ? "1" : "0");
}

std::string PackSettings::words() const {
  return "rows of " + with_commas(context) + " tokens, " + std::string(packing_name(packing)) +
         (units_are_documents() ? ", documents apart" : ", documents end to end") +
         (validation_fraction > 0 ? ", " + exact(validation_fraction) + " held out" : "");
}

Packer::Packer(Packing packing, int64_t context, Sink& sink) : packing_(packing), context_(context), sink_(sink) {
  if (context < 1) throw Error(ErrorKind::kInternal, "data", "the context was not checked");
}

void Packer::add(int64_t token, int64_t positions) {
  if (positions < 1) return;
  targets_ += positions;
  const auto row = [&](int64_t at, int64_t count) {
    sink_.add({static_cast<uint64_t>(at), static_cast<uint64_t>(rows_++ * context_), static_cast<uint64_t>(count)});
  };
  if (packing_ == Packing::kStream) {
    sink_.add({static_cast<uint64_t>(token), static_cast<uint64_t>(place_), static_cast<uint64_t>(positions)});
    place_ += positions;
    rows_ = (place_ + context_ - 1) / context_;
  } else {
    for (; positions >= context_; token += context_, positions -= context_) row(token, context_);
    if (positions > 0 && packing_ == Packing::kDocument) row(token, positions);
    if (positions > 0 && packing_ == Packing::kBestFit) window_.push_back({token, positions});
  }
  if (++documents_ == kWindow) end_window();
}

void Packer::finish() {
  if (documents_ > 0) end_window();
}

void Packer::end_window() {
  if (!window_.empty()) pack_window();
  window_.clear();
  documents_ = 0;
  sink_.end_window();
}

void Packer::pack_window() {
  // By falling length; equal ones in the order of the source.
  std::vector<size_t> order(window_.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return window_[a].count > window_[b].count; });
  // The fullest bin with room for a piece takes it; of several, the newest.
  std::vector<std::vector<size_t>> bins;                 // their pieces
  std::map<int64_t, std::vector<size_t>> with_room_for;  // bins by what they have left, the newest last
  for (const size_t i : order) {
    size_t bin = bins.size();
    int64_t left = context_;
    if (const auto fullest = with_room_for.lower_bound(window_[i].count); fullest != with_room_for.end()) {
      bin = fullest->second.back();
      left = fullest->first;
      fullest->second.pop_back();
      if (fullest->second.empty()) with_room_for.erase(fullest);
    } else {
      bins.emplace_back();
    }
    bins[bin].push_back(i);
    with_room_for[left - window_[i].count].push_back(bin);
  }
  for (std::vector<size_t>& bin : bins) {
    std::sort(bin.begin(), bin.end());  // in the order of the source
    auto place = static_cast<uint64_t>(rows_++ * context_);
    for (const size_t i : bin) {
      sink_.add({static_cast<uint64_t>(window_[i].token), place, static_cast<uint64_t>(window_[i].count)});
      place += static_cast<uint64_t>(window_[i].count);
    }
  }
}

}  // namespace annulus
