// A TierFile in memory that fails at a given transfer, for tests of what uses files.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "common/error.h"
#include "memory/tiers/tier_file.h"

namespace annulus {

class CountedFile : public TierFile {
 public:
  explicit CountedFile(bool direct) : direct_(direct) {}
  void reserve(int64_t bytes) override {
    if (bytes > most_) throw Error(ErrorKind::kResource, "memory", "the disk is full");
    bytes_.resize(static_cast<size_t>(std::max<int64_t>(bytes, static_cast<int64_t>(bytes_.size()))));
  }
  void write(int64_t offset, const void* data, int64_t bytes) override {
    check(offset, data, bytes);
    const int number = writes_++;
    if (number == fail_write_) throw Error(ErrorKind::kResource, "memory", "the disk failed at a write");
    if (before_write_) before_write_(number);
    std::copy_n(static_cast<const char*>(data), bytes, bytes_.begin() + offset);
  }
  void read(int64_t offset, void* data, int64_t bytes) override {
    check(offset, data, bytes);
    if (reads_++ == fail_read_) throw Error(ErrorKind::kResource, "memory", "the disk failed at a read");
    std::copy_n(bytes_.begin() + offset, bytes, static_cast<char*>(data));
    ++reads_done_;
  }
  bool direct() const override { return direct_; }

  int64_t most_ = int64_t{1} << 40;
  int fail_write_ = -1, fail_read_ = -1;
  std::function<void(int number)> before_write_;
  std::atomic<int> writes_ = 0, reads_ = 0, reads_done_ = 0;

 private:
  void check(int64_t offset, const void* data, int64_t bytes) const {
    ASSERT_LE(offset + bytes, static_cast<int64_t>(bytes_.size())) << "beyond what was reserved";
    if (!direct_) return;
    EXPECT_EQ(offset % kBlock, 0);
    EXPECT_EQ(bytes % kBlock, 0);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % kBlock, 0U);
  }
  const bool direct_;
  std::vector<char> bytes_;
};

}  // namespace annulus
