// Which tokens of a source make which row. Used by row_index.cc, which stores the result.
//
// A position is a token whose target is the token that follows it. A unit is a stretch of the source in which each
// token predicts the next: a document, or, if documents do not matter, neighbouring ones. Its last token is not an
// input and its first is not a target, so it has one position less than tokens. A row has `context` positions, and each
// of its pieces lies in one document, whatever a unit is. Of a prefix tree each branch is a unit (tree_packing.h).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// Inputs [token, token + count), targets [token + 1, token + count + 1) of a source's sequence.
struct Piece {
  int64_t token = 0, count = 0;
  int64_t after = -1;     // of a prefix tree: the input, in a piece before it in the row, behind which it goes on
  bool repeated = false;  // likewise: inputs for what goes on behind them, whose targets count in another row

  friend bool operator==(const Piece&, const Piece&) = default;
};

enum class Packing {
  kStream,    // documents follow each other and are cut every `context` positions; the last row is padded
  kBestFit,   // whole documents; those of a window of 65,536 are combined so that there is little padding
  kDocument,  // one document in a row
};
std::string_view packing_name(Packing packing);  // "stream", "best-fit", "document"
Packing packing_named(std::string_view name);    // raises Error(kInternal) for an unknown name

struct PackSettings {
  int64_t context = 0;
  Packing packing = Packing::kStream;
  bool documents = false;  // for kStream: units are documents, as they always are for the others
  double validation_fraction = 0;
  // kBestFit and kDocument cut a document that is longer than a row. With this they raise Error(kInput) instead.
  bool refuse_long = false;

  bool units_are_documents() const { return documents || packing != Packing::kStream; }
  std::string text() const;   // for digests: settings that give the same rows have the same text
  std::string words() const;  // for people: "rows of 512 tokens, best-fit, documents apart"

  friend bool operator==(const PackSettings&, const PackSettings&) = default;
};

// Where a piece lies: place = row * context + its offset in the row. A piece of kStream may extend over several rows.
struct PlacedPiece {
  uint64_t token = 0, place = 0, count : 63 = 0, repeated : 1 = 0;
};

// Takes documents in order and gives placed pieces, sorted by place. Holds at most one window of documents.
class Packer {
 public:
  static constexpr int64_t kWindow = 65536;

  class Sink {
   public:
    virtual ~Sink() = default;
    virtual void add(const PlacedPiece& piece) = 0;
    // Every piece before this has smaller tokens than every piece after it.
    virtual void end_window() = 0;
  };

  Packer(Packing packing, int64_t context, Sink& sink);

  // Adds the positions of a document, the first of which is `token`; documents without positions are skipped.
  void add(int64_t token, int64_t positions);
  // Adds pieces that one row must hold, next to each other in this order: not for kStream, and at most `context`
  // positions.
  void add_together(std::vector<Piece> pieces);
  // Call once, after the last document.
  void finish();

  int64_t rows() const { return rows_; }
  int64_t targets() const { return targets_; }

 private:
  // What one row holds next to each other.
  struct Bundle {
    std::vector<Piece> pieces;
    int64_t positions = 0;
  };

  void place(const Bundle& bundle, int64_t at);
  void end_document();
  void end_window();
  void pack_window();

  Packing packing_;
  int64_t context_;
  Sink& sink_;
  std::vector<Bundle> window_;  // kBestFit: documents that are shorter than a row
  int64_t documents_ = 0;       // in this window
  int64_t rows_ = 0;
  int64_t targets_ = 0;
  int64_t place_ = 0;  // kStream: the next place
};

}  // namespace annulus
