// See plan_svg.h.
#include "attention/execution/plan_svg.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "attention/execution/mask_drawing.h"
#include "attention/execution/mask_grid.h"
#include "attention/execution/plan_timeline.h"
#include "attention/plan/choice.h"
#include "attention/plan/time.h"
#include "common/error.h"
#include "common/svg/canvas.h"
#include "common/svg/legend.h"
#include "common/svg/palette.h"
#include "common/text.h"

namespace annulus {
namespace {

// Cells on a side: as a rule, at most, and of plans for very many ranks.
constexpr int kCells = 96, kMostCells = 192, kFewerCells = 48;
constexpr int kShownRanks = 8, kPricedRanks = 256;
constexpr size_t kShownSteps = 16;
constexpr int kPlanWidth = 960, kPlanEdge = 24, kSide = 384, kAxis = 62, kStrip = 9;
constexpr int kPlanFont = 12;
constexpr int kNamedColors = 8;

}  // namespace

// One direction of one rank.
struct PlanDirection {
  std::vector<StepCost> costs;
  std::vector<TimelineStep> steps;
};
struct KnownRank {
  int rank = 0;
  PlanDirection forward, backward;
};

namespace {

// The rank that owns the keys of all of these tiles; -1: several, or there are none.
int owner_of_keys(const std::vector<Tile>& tiles, const Layout& keys) {
  const auto owns = [&](int rank, int64_t position) {
    const auto& spans = keys.spans[static_cast<size_t>(rank)];
    return std::any_of(spans.begin(), spans.end(), [&](const Span& span) { return span.contains(position); });
  };
  if (tiles.empty()) return -1;
  int owner = 0;
  while (owner < keys.ranks() && !owns(owner, tiles.front().key_positions.begin)) ++owner;
  if (owner == keys.ranks()) return -1;
  const bool all = std::all_of(tiles.begin(), tiles.end(), [&](const Tile& tile) {
    return owns(owner, tile.key_positions.begin) && owns(owner, tile.key_positions.last());
  });
  return all ? owner : -1;
}

std::vector<int> peers_of(const std::vector<Transfer>& transfers) {
  std::set<int> peers;
  for (const Transfer& t : transfers) peers.insert(t.peer);
  return {peers.begin(), peers.end()};
}

PlanDirection direction_of(const Program& program, bool backward, const Layout& keys) {
  const PlanTerms& terms = *program.request.terms;
  PlanDirection direction{step_costs(program, backward, terms.machine, {terms.head_dim, terms.element_bytes}), {}};
  const std::vector<Step>& steps = backward ? program.backward : program.forward;
  for (size_t s = 0; s < steps.size(); ++s) {
    TimelineStep& step = direction.steps.emplace_back();
    step.tiles = steps[s].tiles.size();
    step.keys_of = owner_of_keys(steps[s].tiles, keys);
    step.to = peers_of(steps[s].sends);
    step.from = peers_of(steps[s].receives);
    for (const StepCost::Part& part : direction.costs[s].sends) step.sent += part.bytes;
    for (const StepCost::Part& part : direction.costs[s].receives) step.received += part.bytes;
  }
  return direction;
}

// How many cells a side has at most. Each position has one if that is possible, or else cells end where chunks of ranks
// do, which often own two, so that each belongs to one rank.
int cells_on_a_side(int ranks, int64_t length) {
  if (length <= kMostCells) return kMostCells;
  if (ranks > kPricedRanks) return kFewerCells;
  const int chunks = 2 * ranks;
  return chunks > kMostCells ? kCells : std::max(chunks, kCells / chunks * chunks);
}

// Whether a tile computes pairs of the first batch row and query head.
bool is_drawn(const Tile& tile, const Program& program) {
  if (!tile.batch.contains(0)) return false;
  if (tile.queries < 0) return tile.heads.contains(0);
  const Span& heads = program.buffers[static_cast<size_t>(tile.queries)].rows.blocks.front().heads;
  return heads.begin == 0 && tile.heads.contains(0);
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::vector<std::string> texts;
  for (const int rank : ranks) texts.push_back(std::to_string(rank));
  return join(texts, ", ");
}

}  // namespace

struct PlanPicture::Content {
  PlanRequest request;
  Layout queries, keys;
  std::optional<MaskGrid> by_rank, by_step;
  std::vector<KnownRank> known;
  size_t steps = 0;
  int64_t added = 0;
  bool other_heads = false;  // whether some rank computes nothing of the head that is drawn, but of others

  void begin(const Program& program);
  void add(const Program& program);
};

void PlanPicture::Content::begin(const Program& program) {
  request = program.request;
  queries = query_layout(request);
  keys = key_layout(request);
  const int cells = cells_on_a_side(request.ranks, std::max(queries.length, keys.length));
  by_rank.emplace(GridAxis::in_order(queries.length, cells), GridAxis::in_order(keys.length, cells));
  by_step.emplace(GridAxis::by_rank(queries, cells), GridAxis::by_rank(keys, cells));
}

void PlanPicture::Content::add(const Program& program) {
  if (added++ == 0) begin(program);
  bool any = false, drawn = false;
  for (size_t s = 0; s < program.forward.size(); ++s) {
    for (const Tile& tile : program.forward[s].tiles) {
      any = true;
      if (!is_drawn(tile, program)) continue;
      drawn = true;
      by_rank->add(tile, program.masks, program.rank);
      by_step->add(tile, program.masks, static_cast<int>(s));
    }
  }
  other_heads = other_heads || (any && !drawn);
  steps = std::max({steps, program.forward.size(), program.backward.size()});
  const int last = request.ranks - 1;
  bool priced = request.ranks <= kPricedRanks;
  for (int i = 0; i < kShownRanks && !priced; ++i) priced = program.rank == i * last / (kShownRanks - 1);
  if (priced) {
    known.push_back({program.rank, direction_of(program, false, keys), direction_of(program, true, keys)});
  }
}

namespace {

// How ranks come by what they compute with, for those who do not know the schedules.
std::string_view what_travels(ScheduleKind schedule) {
  switch (schedule) {
    case ScheduleKind::kRing:
      return "Keys and values travel around a ring of all ranks: those that a rank receives in one step it computes "
             "with in the next one, and sends on.";
    case ScheduleKind::kAllGather:
      return "Each rank sends its keys and values to all others, which compute when they have them.";
    case ScheduleKind::kGroupCast:
      return "Each rank gets the keys and values that its queries need straight from the ranks that own them.";
    case ScheduleKind::kDoubleRing:
      return "Keys and values travel around a ring inside each group of ranks, and around another one between groups.";
    case ScheduleKind::kUlysses:
      return "The ranks of a group exchange queries, keys and values, so that each computes some heads of them all; "
             "results go back.";
    case ScheduleKind::kUlyssesRing:
      return "The ranks of a group exchange queries, keys and values, so that each computes some heads of them all; "
             "between groups keys and values travel around rings.";
    case ScheduleKind::kMesh:
      return "Queries travel along the rows of a grid of ranks, keys and values along its columns; partial results go "
             "back.";
    case ScheduleKind::kAuto:
      break;
  }
  return "";
}

// Draws the page of a plan.
class PlanPage {
 public:
  PlanPage(const PlanRequest& request, const Layout& queries, const Layout& keys, const MaskGrid& by_rank,
           const MaskGrid& by_step, const std::vector<KnownRank>& known, size_t steps, bool other_heads)
      : request_(request),
        queries_(queries),
        keys_(keys),
        by_rank_(by_rank),
        by_step_(by_step),
        known_(known),
        steps_(steps),
        other_heads_(other_heads),
        forward_(timeline_of(&KnownRank::forward, "Forward")),
        backward_(timeline_of(&KnownRank::backward, "Backward")) {}

  std::string draw() {
    draw_title();
    y_ += 26;
    draw_masks();
    draw_mask_legend();
    for (Timeline* timeline : {&forward_, &backward_}) {
      y_ += 40;
      y_ = draw_timeline(canvas_, *timeline, kPlanEdge, kPlanWidth - kPlanEdge - 16, y_, end_of(*timeline),
                         [&](size_t step) { return color_of_step(step); });
    }
    Legend legend(canvas_, {kPlanEdge, y_ + 26}, kPlanWidth - 2 * kPlanEdge);
    legend.words("A bar has the colour of its step.");
    legend.swatch("waits for transfers or other ranks", kWaits, kWaitsLine);
    legend.swatch("packs, adds and writes results", kAdds);
    canvas_.describe(title_, description());
    return canvas_.print(kPlanWidth, legend.bottom() + kPlanEdge);
  }

 private:
  bool shows_all() const { return request_.ranks <= kShownRanks; }

  // The ranks to draw, ascending: all, or the first, the last, those that end last, and some between.
  std::vector<int> shown_ranks(const std::vector<RankTime>& forward, const std::vector<RankTime>& backward) const {
    std::set<int> shown;
    if (shows_all() || known_.size() <= kShownRanks) {
      for (const KnownRank& known : known_) shown.insert(known.rank);
      return {shown.begin(), shown.end()};
    }
    for (const auto* times : {&forward, &backward}) shown.insert(known_[index_of_slowest(*times)].rank);
    for (const int parts : {1, 2, 3, 4, 5, 6, 7}) {
      for (int i = 0; i <= parts && shown.size() < kShownRanks; ++i) shown.insert(i * (request_.ranks - 1) / parts);
    }
    return {shown.begin(), shown.end()};
  }

  static size_t index_of_slowest(const std::vector<RankTime>& times) {
    const auto less = [](const RankTime& a, const RankTime& b) { return a.seconds < b.seconds; };
    return static_cast<size_t>(std::max_element(times.begin(), times.end(), less) - times.begin());
  }

  std::vector<RankTime> predict(PlanDirection KnownRank::*direction,
                                std::vector<std::vector<StepClock>>* clocks) const {
    std::vector<RankSteps> some;
    for (const KnownRank& known : known_) some.push_back({known.rank, (known.*direction).costs});
    return sweep(some, request_.ranks, request_.terms->machine, clocks);
  }

  Timeline timeline_of(PlanDirection KnownRank::*direction, const std::string& name) const {
    std::vector<std::vector<StepClock>> clocks;
    const std::vector<RankTime> times = predict(direction, &clocks);
    const std::vector<int> shown =
        shown_ranks(predict(&KnownRank::forward, nullptr), predict(&KnownRank::backward, nullptr));
    Timeline timeline{name, "", "", {}, false};
    size_t most = 0;
    for (size_t i = 0; i < known_.size(); ++i) {
      const std::vector<TimelineStep>& steps = (known_[i].*direction).steps;
      most = std::max(most, steps.size());
      for (const TimelineStep& step : steps) timeline.transfers = timeline.transfers || !step.to.empty();
      if (!std::binary_search(shown.begin(), shown.end(), known_[i].rank)) continue;
      TimelineRank& rank = timeline.ranks.emplace_back(TimelineRank{known_[i].rank, times[i], steps});
      if (rank.steps.size() > kShownSteps) rank.steps.resize(kShownSteps);
      for (size_t s = 0; s < rank.steps.size(); ++s) rank.steps[s].clock = clocks[i][s];
    }
    const size_t last = index_of_slowest(times);
    timeline.title = name + ": " + seconds_text(times[last].seconds) + " predicted" +
                     (request_.ranks > 1 ? "; rank " + std::to_string(known_[last].rank) + " ends last" : "");
    timeline.how = how_to_read(timeline.transfers);
    if (!shows_all()) {
      timeline.how += " " + std::to_string(shown.size()) + " of " + counted(request_.ranks, "rank") +
                      " are shown: " + ranks_text(shown) + ".";
      if (known_.size() < static_cast<size_t>(request_.ranks)) timeline.how += " No rank waits for others.";
    }
    if (most > kShownSteps) {
      timeline.how += " The first " + std::to_string(kShownSteps) + " of " +
                      counted(static_cast<int64_t>(most), "step") + " are shown.";
    }
    return timeline;
  }

  std::string how_to_read(bool transfers) const {
    if (!transfers) return "Each rank has the keys and values that its queries need, and nothing is sent.";
    return request_.terms->machine.overlap
               ? "In each step a rank computes with keys and values that it has, and meanwhile sends rows on and "
                 "receives those of later steps."
               : "In each step a rank computes with keys and values that it has, and then, because nothing overlaps on "
                 "this machine, sends rows on and receives those of later steps.";
  }

  static double end_of(const Timeline& timeline) {
    double seconds = 0;
    for (const TimelineRank& rank : timeline.ranks) {
      if (!rank.steps.empty()) seconds = std::max(seconds, rank.steps.back().clock.end);
    }
    return seconds;
  }

  void draw_title() {
    const AttentionShape& shape = request_.shape;
    title_ = counted(request_.ranks, "rank") + ", layout " +
             (request_.uneven_lengths.empty() ? std::string(to_string(request_.layout)) : "of uneven lengths") +
             ", schedule " + std::string(to_string(request_.schedule)) +
             (request_.within > 0 ? ", within " + std::to_string(request_.within) : "");
    canvas_.text({kPlanEdge, 34}, "Attention over " + title_, 19, kPlanWidth - 2 * kPlanEdge, kInk, /*bold=*/true);
    title_ = "Attention over " + title_;
    const std::string pattern = request_.pattern.text();
    constexpr size_t kMostOfPattern = 360;
    pattern_ = pattern.substr(0, kMostOfPattern) + (pattern.size() > kMostOfPattern ? " ..." : "");
    sizes_ = with_commas(shape.q_len, shape.q_len == shape.k_len ? "token" : "query") +
             (shape.q_len == shape.k_len ? "" : " and " + with_commas(shape.k_len, "key")) +
             (shape.batch > 1 ? ", " + counted(shape.batch, "batch row") : "") + ", " +
             counted(shape.heads, "query head") + " and " + counted(shape.kv_heads, "kv head") + " of " +
             std::to_string(request_.terms->head_dim) + " elements; times predicted on " + request_.terms->machine.name;
    y_ = canvas_.paragraph({kPlanEdge, 56}, "pattern " + pattern_, kPlanFont, kPlanWidth - 2 * kPlanEdge, kInk);
    y_ = canvas_.paragraph({kPlanEdge, y_}, sizes_, kPlanFont, kPlanWidth - 2 * kPlanEdge, kFaint);
    if (request_.ranks == 1) return;
    y_ = canvas_.paragraph({kPlanEdge, y_ + 4}, what_travels(request_.schedule), kPlanFont + 1,
                           kPlanWidth - 2 * kPlanEdge, kInk);
  }

  std::string color_of_rank(int rank) const {
    if (request_.ranks <= kNamedColors) return std::string(kHues[static_cast<size_t>(rank)].line);
    return scale_color(ColorScale::kPlasma, static_cast<double>(rank) / (request_.ranks - 1));
  }

  std::string color_of_step(size_t step) const {
    return scale_color(ColorScale::kViridis,
                       steps_ > 1 ? static_cast<double>(step) / static_cast<double>(steps_ - 1) : 0);
  }

  // Draws a panel with its title, its axes and the ranks that own rows and columns.
  Box draw_panel(int x, const MaskGrid& grid, bool sorted, const std::string& title, const std::string& how) {
    canvas_.text({x, y_}, title, 15, kAxis + kSide, kInk, /*bold=*/true);
    canvas_.text({x, y_ + 18}, how, kPlanFont, kAxis + kSide, kFaint);
    const Box area{x + kAxis, y_ + 62, kSide, kSide};
    canvas_.text({area.x, area.y - kStrip - 18}, "keys", kPlanFont, 60, kInk);
    canvas_.upward_text({x + 11, area.y + area.height / 2}, "queries", kPlanFont, kSide, kInk);
    draw_owners(grid.columns(), keys_, sorted, area, /*down=*/false);
    draw_owners(grid.rows(), queries_, sorted, area, /*down=*/true);
    if (!sorted) {
      const auto number = [&](const GridAxis& axis, bool down) {
        const std::string past = with_commas(axis.length());
        if (down) {
          canvas_.text({area.x - kStrip - 4, area.y + 9}, "0", 10, 40, kFaint, false, SvgCanvas::Anchor::kEnd);
          canvas_.upward_text({area.x - kStrip - 4, area.bottom() - text_width(past, 10) / 2}, past, 10, kSide, kFaint);
        } else {
          canvas_.text({area.right(), area.y - kStrip - 4}, past, 10, 120, kFaint, false, SvgCanvas::Anchor::kEnd);
        }
      };
      number(grid.columns(), false);
      number(grid.rows(), true);
    }
    return area;
  }

  // A strip of colours beside the rows, or above the columns, shows who owns them; sorted by rank it has their names.
  void draw_owners(const GridAxis& axis, const Layout& layout, bool sorted, const Box& area, bool down) {
    const auto strip = [&](int from, int until) {
      return down ? Box{area.x - kStrip - 2, from, kStrip, until - from}
                  : Box{from, area.y - kStrip - 2, until - from, kStrip};
    };
    const int start = down ? area.y : area.x;
    int64_t place = 0;
    if (!sorted) canvas_.box(strip(start, start + kSide), 0, kSeveral, "none");
    for (int rank = 0; rank < layout.ranks(); ++rank) {
      const std::string name = "rank " + std::to_string(rank), color = color_of_rank(rank);
      canvas_.open(name + " owns " + with_commas(layout.count(rank), "position"));
      if (sorted) {
        const int from = MaskDrawing::at(axis, place, start, kSide);
        place += layout.count(rank);
        const int until = MaskDrawing::at(axis, place, start, kSide);
        if (until > from) canvas_.box(strip(from, until), 0, color, "none");
        const int middle = (from + until) / 2;
        if (down && until - from >= 12) {
          canvas_.text({area.x - kStrip - 5, middle + 4}, name, 10, kAxis - kStrip - 19, kInk, false,
                       SvgCanvas::Anchor::kEnd);
        } else if (!down && until - from >= text_width(std::to_string(rank), 10) + 4) {
          const bool long_name = until - from >= text_width(name, 10) + 4;
          canvas_.text({middle, area.y - kStrip - 4}, long_name ? name : std::to_string(rank), 10, until - from, kInk,
                       false, SvgCanvas::Anchor::kMiddle);
        }
      } else {
        std::string path;
        for (const Span& span : layout.spans[static_cast<size_t>(rank)]) {
          // Ranks that alternate within a few pixels leave the colour of several.
          const int64_t pieces = span.stride == 1 ? 1 : span.count;
          if (pieces > kCells) continue;
          for (int64_t i = 0; i < pieces; ++i) {
            const int64_t first = span.at(i), past = pieces == 1 ? span.last() + 1 : first + 1;
            const int from = MaskDrawing::at(axis, first, start, kSide),
                      until = MaskDrawing::at(axis, past, start, kSide);
            if (until > from) path += box_path(strip(from, until));
          }
        }
        if (!path.empty()) canvas_.area(path, color, "none");
      }
      canvas_.close();
    }
  }

  void draw_masks() {
    const std::string head = request_.shape.heads * request_.shape.batch > 1 ? ", of the first head" : "";
    const int second = kPlanWidth - kPlanEdge - kAxis - kSide;
    MaskDrawing ranks(by_rank_, draw_panel(kPlanEdge, by_rank_, false, "Who computes which pair" + head,
                                           "Queries and keys in the order of the sequence; colour: rank"));
    ranks.draw(
        canvas_, request_.ranks, [&](int r) { return r == request_.ranks ? std::string(kSeveral) : color_of_rank(r); },
        [&](int r) {
          return r == request_.ranks ? "several ranks"
                                     : "rank " + std::to_string(r) + " computes " + pairs_text(by_rank_, r);
        });
    MaskDrawing steps(by_step_, draw_panel(second, by_step_, true, "At which step" + head,
                                           "The same pairs, sorted by the ranks that own them; colour: step"));
    steps.draw(
        canvas_, -1, [&](int s) { return color_of_step(static_cast<size_t>(s)); },
        [&](int s) { return "step " + std::to_string(s) + ": " + pairs_text(by_step_, s); });
    mixed_ = ranks.any_several();
    faint_ = ranks.any_faint() || steps.any_faint();
    y_ += 62 + kSide;
  }

  static std::string pairs_text(const MaskGrid& grid, int number) {
    return with_commas(static_cast<int64_t>(grid.pairs()[static_cast<size_t>(number)]), "pair");
  }

  void draw_mask_legend() {
    Legend legend(canvas_, {kPlanEdge, y_ + 28}, kPlanWidth - 2 * kPlanEdge);
    legend.numbers("rank", request_.ranks, [&](int r) { return color_of_rank(r); });
    if (mixed_) legend.swatch("several ranks", kSeveral);
    legend.swatch("not counted", kMasked, "#c3cad2");
    if (faint_) legend.words("Fainter: only some of a cell's pairs are counted.");
    if (other_heads_) legend.words("Other ranks compute other heads.");
    legend.next_line();
    legend.numbers("step", static_cast<int>(steps_), [&](int s) { return color_of_step(static_cast<size_t>(s)); });
    y_ = legend.bottom();
  }

  std::string description() const {
    std::string text = title_ + ". Pattern " + pattern_ + ". " + sizes_ +
                       ". The first picture shows by colour which rank computes which pair of query and key, the "
                       "second at which step, the lower ones when ranks compute, send and receive.";
    for (const Timeline* timeline : {&forward_, &backward_}) {
      text += " " + timeline->title + ".";
      for (const TimelineRank& rank : timeline->ranks) {
        const RankTime& t = rank.time;
        text += " Rank " + std::to_string(rank.rank) + " takes " + seconds_text(t.seconds) + ": computes " +
                seconds_text(t.compute) + ", waits " + seconds_text(t.exposed) + ", adds " + seconds_text(t.add) +
                ", sends " + bytes_text(t.bytes) + ".";
      }
    }
    return text;
  }

  const PlanRequest& request_;
  const Layout &queries_, &keys_;
  const MaskGrid &by_rank_, &by_step_;
  const std::vector<KnownRank>& known_;
  const size_t steps_;
  const bool other_heads_;
  Timeline forward_, backward_;
  SvgCanvas canvas_;
  std::string title_, pattern_, sizes_;
  int y_ = 0;
  bool mixed_ = false, faint_ = false;
};

}  // namespace

PlanPicture::PlanPicture() : content_(std::make_unique<Content>()) {}
PlanPicture::~PlanPicture() = default;

void PlanPicture::add(const Program& program) { content_->add(program); }

std::string PlanPicture::svg() const {
  const Content& c = *content_;
  if (c.added == 0 || c.added != c.request.ranks) {
    throw Error(ErrorKind::kInternal, "plan", "a picture of a plan needs the programs of all ranks");
  }
  return PlanPage(c.request, c.queries, c.keys, *c.by_rank, *c.by_step, c.known, c.steps, c.other_heads).draw();
}

}  // namespace annulus
