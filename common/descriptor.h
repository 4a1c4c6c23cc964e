// Descriptor: an open file that is closed when it is no longer held. Used by code that reads files piece by piece.
#pragma once

#include <unistd.h>

#include <utility>

namespace annulus {

class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  operator int() const { return number_; }  // NOLINT(google-explicit-constructor): as system calls take it

 private:
  int number_;
};

}  // namespace annulus
