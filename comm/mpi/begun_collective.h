// A begun collective over MPI: its headers and messages. Used by mpi_communicator.cc. Thread safety: the caller holds
// the mutex of the runtime.
#pragma once

#include <mpi.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/begun_collective.h"
#include "comm/communicator.h"
#include "comm/headers.h"
#include "comm/mpi/requests.h"
#include "comm/rounds.h"

namespace annulus::mpi_internal {

class MpiBegunCollective final : public comm_internal::BegunCollective {
 public:
  // control: the MPI communicator that carries the headers of collectives. It carries the data as well, with a tag for
  // each call, because two collectives may reach their data in different orders on different ranks. max_message: the
  // piece of ByteType.
  MpiBegunCollective(const Communicator& comm, MPI_Comm control, int64_t max_message, comm_internal::Begun call);

  // Starts to exchange the headers. Raises Error(kComm) if MPI refuses.
  void start_headers();

  std::string describe_unfinished() const override;
  bool have_headers() const { return headers_.open == 0; }
  // The number of events never decreases, so a caller that compares two values notices every event between them.
  Movement movement() const;

 private:
  const std::vector<comm_internal::CollectiveHeader>* headers() override;
  void start_step(int64_t number, const std::vector<comm_internal::Rounds::Message>& sends,
                  const std::vector<comm_internal::Rounds::Message>& receives,
                  const std::shared_ptr<const void>& kept) override;
  bool finish_step(int64_t number) override;
  Pending& slot(int64_t step) { return steps_[static_cast<size_t>(step % comm_internal::kRoundsAtOnce)]; }

  MPI_Comm control_;
  int64_t bytes_;  // that a rank sends, approximately
  Pending headers_;
  std::array<Pending, comm_internal::kRoundsAtOnce> steps_;
  int64_t finished_messages_ = 0;  // of the finished steps
};

}  // namespace annulus::mpi_internal
