// Tests of masks of tokens and of kept keys (padding): which pairs they show, which bits a rank holds, and what is
// refused. pattern_test.cc compares patterns with masks with their definition.
#include "attention/pattern/token_mask.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <memory>
#include <vector>

#include "attention/oracle/oracle.h"
#include "attention/pattern/pattern.h"
#include "attention/testing/any_pattern.h"
#include "common/error.h"

namespace annulus::token_mask_test {
namespace {

// While this exists, the bits of a mask may take so many bytes.
class Limit {
 public:
  explicit Limit(int64_t bytes) : before_(mask_limit()) { set_mask_limit(bytes); }
  ~Limit() { set_mask_limit(before_); }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

 private:
  const int64_t before_;
};

PatternSpec with_mask(TokenMask mask) {
  PatternSpec spec;
  spec.mask = given_mask(std::make_shared<const TokenMask>(std::move(mask)));
  return spec;
}

void expect_refused(ErrorKind kind, const std::vector<std::string>& parts, const std::function<void()>& run) {
  try {
    run();
    ADD_FAILURE() << "not refused: " << parts[0];
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
}

// What the bytes say about each pair, not what the mask that is made of them says. Any other byte than 0 shows a pair.
RC_GTEST_PROP(TokenMask, ShowsThePairsOfNonzeroBytes, ()) {
  const int64_t queries = *rc::gen::inRange<int64_t>(1, 300), keys = *rc::gen::inRange<int64_t>(1, 300);
  const AttentionShape shape{*rc::gen::inRange<int64_t>(1, 3), 2, 1, queries, keys, 0};
  const int64_t batch = *rc::gen::element(int64_t{1}, shape.batch), heads = *rc::gen::element<int64_t>(1, 2);
  std::vector<uint8_t> bytes(static_cast<size_t>(batch * heads * queries * keys));
  const int64_t width = *rc::gen::inRange<int64_t>(1, 200);  // runs of bytes that are 0, or not
  for (size_t i = 0; i < bytes.size(); ++i) {
    const uint64_t draw = (i / static_cast<size_t>(width) + 1) * 0x9e3779b97f4a7c15;
    bytes[i] = (draw >> 60) < 9 ? 0 : static_cast<uint8_t>(1 + (draw >> 40) % 255);
  }
  bytes[0] = 128;
  const PatternSpec spec = with_mask(token_mask_from_dense(bytes.data(), batch, heads, queries, keys));
  const Count count = count_of(spec, shape);
  const Pattern pattern = make_pattern(spec, shape);
  int64_t pairs = 0;
  bool later = false;
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t q = 0; q < queries; ++q) {
        for (int64_t k = 0; k < keys; ++k) {
          const int64_t plane = (batch == 1 ? 0 : b) * heads + (heads == 1 ? 0 : h);
          const bool shown = bytes[static_cast<size_t>((plane * queries + q) * keys + k)] != 0;
          RC_ASSERT(count(b, h, q, k) == shown);
          pairs += shown;
          later = later || (shown && k > q);
        }
      }
    }
  }
  RC_ASSERT(count_pairs(pattern) == pairs);
  RC_ASSERT(sees_later(spec, shape) == later);
  for (int64_t b = 0; b < shape.batch; ++b) {
    const AttentionShape row{1, shape.heads, 1, queries, keys, 0};
    const Count of_row = count_of(of_batch_rows(spec, b, 1), row);
    for (int64_t q = 0; q < queries; ++q) RC_ASSERT(of_row(0, 1, q, q % keys) == count(b, 1, q, q % keys));
  }
}

TEST(TokenMask, BitsAreOfPartlyShownBlocksAlone) {
  const int64_t n = 512;  // 4 x 4 blocks; causal: 4 of them are cut by the diagonal
  std::vector<uint8_t> bytes(static_cast<size_t>(2 * 3 * n * n));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = i % n <= i / n % n;
  const TokenMask mask = token_mask_from_dense(bytes.data(), 2, 3, n, n);
  EXPECT_EQ(mask.planes(), 1);  // all six are equal
  EXPECT_EQ(mask.stored->words.size() * 8, 4u * 2048);
  const PatternSpec spec = with_mask(mask);
  const AttentionShape shape{2, 3, 1, n, n, 0};
  const Pattern pattern = make_pattern(spec, shape);
  EXPECT_EQ(pattern.slices.size(), 3u + 4u);
  EXPECT_EQ(count_pairs(pattern), 6 * n * (n + 1) / 2);
  EXPECT_FALSE(sees_later(spec, shape));
  const std::vector<uint8_t> all(static_cast<size_t>(n * n), 1);
  EXPECT_TRUE(token_mask_from_dense(all.data(), 1, 1, n, n).stored->words.empty());
}

TEST(TokenMask, RanksHoldTheBitsOfTheirQueries) {
  const int64_t n = 300;
  std::vector<uint8_t> bytes(static_cast<size_t>(n * n));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = i % 5 != 1;
  const MaskRows rows = [&](int64_t number, int64_t first, int64_t) { return bytes.data() + (number + first) * n; };
  const TokenMask all = token_mask_from_dense(bytes.data(), 1, 1, n, n);
  size_t words = 0;
  for (int64_t rank = 0; rank < 3; ++rank) {
    const TokenMask part = make_token_mask(1, 1, n, n, rows, HeldBits::of({{rank, 3, 100}}), "the mask");
    EXPECT_EQ(part.digest, all.digest);
    EXPECT_FALSE(part.held.all);
    words += part.stored->words.size();
    EXPECT_EQ(all.bytes_holding(part.held), part.bytes());
    EXPECT_EQ(part.bytes_holding(all.held), all.bytes());
    for (int64_t q = 0; q < n; ++q) {
      const MaskBits bits = part.bits(0, q, 0);
      ASSERT_EQ(bits.words != nullptr, q % 3 == rank) << q;
      for (int64_t k = 0; bits.words && k < n; ++k) ASSERT_EQ(bits.shows(k), all.bits(0, q, 0).shows(k));
    }
    EXPECT_NE(with_mask(part), with_mask(all));  // slices of one cannot serve for the other
    EXPECT_EQ(with_mask(part).text(), with_mask(all).text());
    EXPECT_TRUE(sees_later(with_mask(part), {1, 1, 1, n, n, 0}));
    PatternSpec causal = with_mask(part);
    causal.causal = true;
    EXPECT_FALSE(sees_later(causal, {1, 1, 1, n, n, 0}));
  }
  EXPECT_EQ(words, all.stored->words.size());
  // One without bits has the blocks alone.
  const TokenMask none = make_token_mask(1, 1, n, n, rows, {}, "the mask");
  EXPECT_EQ(none.digest, all.digest);
  EXPECT_TRUE(none.stored->words.empty() && none.stored->word_of.empty());
  EXPECT_EQ(none.bits(0, 7, 0).words, nullptr);
  EXPECT_EQ(none.bytes_holding(all.held), all.bytes());
}

TEST(TokenMask, PartsOfBatchRowsAndHeadsAreHeldOnce) {
  const int64_t n = 300;
  std::vector<uint8_t> bytes(static_cast<size_t>(2 * 3 * n * n));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = i % 7 % 2 == 1;
  const TokenMask all = token_mask_from_dense(bytes.data(), 2, 3, n, n);
  ASSERT_EQ(all.planes(), 6);
  const MaskRows rows = [&](int64_t number, int64_t first, int64_t) { return bytes.data() + (number * n + first) * n; };
  // The queries 0 to 99 of row 1, and of its heads 1 and 2 those from 50 on; 50 to 99 are in both.
  const Span row = {1, 1, 1};
  const HeldBits held{false, {{row, Span::range(0, 3), {Span::range(0, 100)}}, {row, {1, 1, 2}, {Span::range(50, n)}}}};
  const TokenMask part = make_token_mask(2, 3, n, n, rows, held, "the mask");
  EXPECT_EQ(part.stored->words.size(), static_cast<size_t>(6 * (100 + 2 * n)));  // three blocks of two words a row
  EXPECT_EQ(all.bytes_holding(held), part.bytes());
  EXPECT_EQ(all.bytes_of_bits(held), 8 * (6 * n + 6 * (100 + 2 * n)));
  const TokenMask cut = part.of_batch_rows(1, 1);
  EXPECT_EQ(cut.stored, part.stored);  // no copy
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 3; ++h) {
      for (int64_t q = 0; q < n; ++q) {
        const bool here = b == 1 && (q < 100 || h > 0);
        ASSERT_EQ(part.bits(part.plane_of[static_cast<size_t>(3 * b + h)], q, 0).words != nullptr, here);
        const HeldBits::Part one{{b, 1, 1}, {h, 1, 1}, {{q, 1, 1}}};
        EXPECT_EQ(part.query_without_bits(one), here ? std::nullopt : std::optional(q));
        if (b == 0) {
          EXPECT_EQ(cut.query_without_bits(one).has_value(), h == 0 && q >= 100);
        }
        if (here) {
          ASSERT_EQ(part.bits(3 + h, q, 200).shows(200), bytes[static_cast<size_t>(((3 + h) * n + q) * n + 200)] != 0);
        }
      }
    }
  }
  EXPECT_EQ(part.query_without_bits({row, Span::range(0, 3), {Span::range(90, 110)}}), 100);
}

TEST(TokenMask, DigestsTellPairsAndSizesApart) {
  std::vector<uint8_t> bytes(16 * 32, 1);
  const auto digest = [&](int64_t batch, int64_t queries, int64_t keys) {
    return token_mask_from_dense(bytes.data(), batch, 1, queries, keys).digest;
  };
  const std::string first = digest(1, 16, 32);
  EXPECT_NE(first, digest(1, 32, 16));
  EXPECT_NE(first, digest(2, 8, 32));
  bytes[100] = 255;
  EXPECT_EQ(first, digest(1, 16, 32));
  bytes[100] = 0;
  EXPECT_NE(first, digest(1, 16, 32));
}

TEST(TokenMask, RefusesBitsBeyondTheLimitWithTheirSize) {
  const int64_t n = 4096;
  std::vector<uint8_t> bytes(static_cast<size_t>(n * n));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = i % 3 != 0;
  const Limit limit(1 << 20);
  // 1,024 blocks of 2 KiB, and a place of 8 bytes for each query
  expect_refused(ErrorKind::kResource,
                 {"2.1 MB", "1.0 MB", "memory.masks", "ANNULUS_MASKS_MIB to 3 (MiB)", "more ranks"},
                 [&] { token_mask_from_dense(bytes.data(), 1, 1, n, n); });
  const MaskRows rows = [&](int64_t, int64_t first, int64_t) { return bytes.data() + first * n; };
  EXPECT_EQ(make_token_mask(1, 1, n, n, rows, HeldBits::of({Span::range(0, 1024)}), "the mask").stored->words.size(),
            65536u);
}

TEST(TokenMask, RefusesMasksThatLeaveNoQueryAKey) {
  const int64_t n = 200;
  std::vector<uint8_t> bytes(static_cast<size_t>(2 * n * n));
  expect_refused(ErrorKind::kPlan, {"the mask shows no pair", "nonzero"},
                 [&] { token_mask_from_dense(bytes.data(), 2, 1, n, n); });
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = i % n > i / n % n;
  PatternSpec spec = with_mask(token_mask_from_dense(bytes.data(), 2, 1, n, n));
  EXPECT_EQ(count_pairs(make_pattern(spec, {2, 1, 1, n, n, 0})), n * (n - 1));
  spec.causal = true;
  expect_refused(ErrorKind::kPlan, {"only keys after their queries", "causal"}, [&] {
    make_pattern(spec, {2, 1, 1, n, n, 0});
  });
  spec.causal = false;  // a window that ends with the query is causal by itself
  spec.kind = PatternSpec::Kind::kWindow;
  spec.left = 9;
  expect_refused(ErrorKind::kPlan, {"only keys after their queries", "causal"}, [&] {
    make_pattern(spec, {2, 1, 1, n, n, 0});
  });
  expect_refused(ErrorKind::kUsage, {"keeps no key"},
                 [] { parse_pattern("{ kind = \"causal\", kept_keys = [] }", "p"); });
  expect_refused(ErrorKind::kUsage, {"keeps no key"},
                 [] { parse_pattern("{ kind = \"causal\", kept_keys = [[], []] }", "p"); });
}

TEST(TokenMask, BroadcastsAsItsShapeSaysOrIsRefused) {
  const AttentionShape shape{2, 4, 2, 30, 40, 0};
  const std::vector<uint8_t> bytes(3 * 4 * 40 * 41, 1);
  const auto made = [&](int64_t batch, int64_t heads, int64_t queries, int64_t keys) {
    return with_mask(token_mask_from_dense(bytes.data(), batch, heads, queries, keys));
  };
  for (const auto& [batch, heads] : {std::pair<int64_t, int64_t>{1, 1}, {1, 4}, {2, 1}, {2, 4}}) {
    EXPECT_EQ(count_pairs(make_pattern(made(batch, heads, 30, 40), shape)), 2 * 4 * 30 * 40);
  }
  for (const PatternSpec& spec : {made(3, 1, 30, 40), made(1, 2, 30, 40), made(1, 1, 40, 30), made(1, 1, 30, 41)}) {
    expect_refused(ErrorKind::kPlan, {"[2 or 1, 4 or 1, 30, 40]"}, [&] { make_pattern(spec, shape); });
  }
}

TEST(TokenMask, RefusesWhatItCannotRead) {
  const AttentionShape shape{2, 1, 1, 8, 8, 0};
  const auto refused = [&](const std::string& text, const std::string& part) {
    expect_refused(ErrorKind::kPlan, {part}, [&] { make_pattern(parse_pattern(text, "p"), shape); });
  };
  refused("{ kind = \"mask\", mask = \"m.safetensors\" }", "m.safetensors has not been read yet");
  refused("{ kind = \"causal\", mask_digest = \"0123\" }", "no mask has the digest 0123");
  refused("{ kind = \"causal\", kept_keys = [[0, 9]] }", "keys up to 8, but there are only 8 keys");
  refused("{ kind = \"causal\", kept_keys = [[[0, 2]], [[0, 2]], [[0, 2]]] }", "one for each of the 2, got 3");
  const auto wrong = [&](const std::string& text, const std::string& part) {
    expect_refused(ErrorKind::kUsage, {part}, [&] { parse_pattern(text, "p"); });
  };
  wrong("{ kind = \"mask\" }", "\"mask\" is missing");
  wrong("{ kind = \"causal\", kept_keys = 3 }", "a list of [begin, end)");
  wrong("{ kind = \"causal\", kept_keys = [3, 4] }", "a list of [begin, end)");
  wrong("{ kind = \"causal\", kept_keys = [[4, 4]] }", "a list of [begin, end)");
  wrong("{ kind = \"causal\", kept_keys = [[0, 4], [4, 6]] }", "with other keys between them");
  wrong("{ kind = \"causal\", kept_keys = [[5, 6], [0, 4]] }", "[0, 4] after one that ends with 6");
  wrong("{ kind = \"union\", mask = \"a\", of = [{ kind = \"full\", mask = \"b\" }] }", "masks of their own");
  PatternSpec spec = with_mask(token_mask_from_dense(std::vector<uint8_t>(64, 1).data(), 1, 1, 8, 8));
  spec.mask.digest = "0123";
  expect_refused(ErrorKind::kPlan, {"demands 0123"}, [&] { make_pattern(spec, shape); });
}

}  // namespace
}  // namespace annulus::token_mask_test
