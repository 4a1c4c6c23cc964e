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
  if (packing_ == Packing::kStream) {
    sink_.add({static_cast<uint64_t>(token), static_cast<uint64_t>(place_), static_cast<uint64_t>(positions)});
    place_ += positions;
    rows_ = (place_ + context_ - 1) / context_;
  } else {
    const auto row = [&](int64_t count) { place({{{token, count}}, count}, rows_++ * context_); };
    for (; positions >= context_; token += context_, positions -= context_) row(context_);
    if (positions > 0 && packing_ == Packing::kDocument) row(positions);
    if (positions > 0 && packing_ == Packing::kBestFit) window_.push_back({{{token, positions}}, positions});
  }
  end_document();
}

void Packer::add_together(std::vector<Piece> pieces) {
  Bundle bundle{std::move(pieces), 0};
  for (const Piece& piece : bundle.pieces) {
    bundle.positions += piece.count;
    targets_ += piece.repeated ? 0 : piece.count;
  }
  if (packing_ == Packing::kStream || bundle.positions > context_) {
    throw Error(ErrorKind::kInternal, "data", "what a row cannot hold together was not refused");
  }
  if (packing_ == Packing::kBestFit) {
    window_.push_back(std::move(bundle));
  } else {
    place(bundle, rows_++ * context_);
  }
  end_document();
}

void Packer::place(const Bundle& bundle, int64_t at) {
  for (const Piece& piece : bundle.pieces) {
    sink_.add({static_cast<uint64_t>(piece.token), static_cast<uint64_t>(at), static_cast<uint64_t>(piece.count),
               piece.repeated});
    at += piece.count;
  }
}

void Packer::end_document() {
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
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return window_[a].positions > window_[b].positions; });
  // The fullest bin with room for a bundle takes it; of several, the newest.
  std::vector<std::vector<size_t>> bins;                 // their bundles
  std::map<int64_t, std::vector<size_t>> with_room_for;  // bins by what they have left, the newest last
  for (const size_t i : order) {
    size_t bin = bins.size();
    int64_t left = context_;
    if (const auto fullest = with_room_for.lower_bound(window_[i].positions); fullest != with_room_for.end()) {
      bin = fullest->second.back();
      left = fullest->first;
      fullest->second.pop_back();
      if (fullest->second.empty()) with_room_for.erase(fullest);
    } else {
      bins.emplace_back();
    }
    bins[bin].push_back(i);
    with_room_for[left - window_[i].positions].push_back(bin);
  }
  for (std::vector<size_t>& bin : bins) {
    std::ranges::sort(bin);  // in the order of the source
    int64_t at = rows_++ * context_;
    for (const size_t i : bin) {
      place(window_[i], at);
      at += window_[i].positions;
    }
  }
}

}  // namespace annulus
