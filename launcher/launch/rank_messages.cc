// See rank_messages.h.
#include "launcher/launch/rank_messages.h"

#include "common/checked_json.h"
#include "launcher/hosts/sockets.h"

namespace annulus {

RankMessage rank_message_of(std::string_view line, int ranks) {
  const nlohmann::json value = message_of(parse_checked_json(line, "launcher", "a message"));
  const CheckedJson message(value, "launcher", "a message");
  const auto rank_at = [&](const char* key) { return static_cast<int>(message.at(key).integer(0, ranks - 1)); };
  if (message.has("rank")) return RankNumber{rank_at("rank")};
  if (message.has("host")) {
    return RankStarted{message.at("host").text(), message.has("beat") ? value.at("beat") : nlohmann::json()};
  }
  if (message.has("record")) {
    return RankRecord{message.at("record").text(kLongestMessage), message.at("shown").boolean(),
                      message.at("of_one").boolean()};
  }
  if (message.has("step")) return RankProgress{message.at("step").integer(0, INT64_MAX)};
  if (message.has("checkpoint")) {
    const CheckedJson checkpoint = message.at("checkpoint");
    return RankCheckpoint{checkpoint.at("step").integer(0, INT64_MAX), checkpoint.at("folder").text(kLongestMessage),
                          checkpoint.at("command").texts()};
  }
  if (message.has("error")) {
    const std::string wire = message.at("error").text(kLongestMessage);
    return RankFailure{Error::from_wire(wire).value_or(Error(ErrorKind::kInternal, "launcher",
                                                             "failed with a report that cannot be read: " + wire)),
                       message.at("reported").boolean(), message.has("cause") ? rank_at("cause") : -1};
  }
  return RankExit{static_cast<int>(message.at("exit").integer(0, 255))};
}

}  // namespace annulus
