// See groups.h.
#include "comm/c10d/groups.h"

#include <map>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <utility>
#include <vector>

#include "comm/c10d/c10d_communicator.h"
#include "comm/c10d/channel.h"
#include "common/error.h"

namespace annulus {

namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// Null if no group is registered under this name.
GroupPtr registered(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    return {};
  }
}

struct Entry {
  GroupPtr group;
  std::mutex mutex;  // guards comm while it is made
  std::shared_ptr<Communicator> comm;
};

struct Groups {
  std::mutex mutex;
  std::map<std::pair<std::string, std::string>, std::shared_ptr<Entry>> entries;  // the key: names of group and device

  // Removes the entries of groups that are no longer registered. The caller destroys them without the lock, because the
  // destructor of a group waits for the group's threads.
  std::vector<std::shared_ptr<Entry>> take_ended() {
    std::vector<std::shared_ptr<Entry>> ended;
    const std::lock_guard lock(mutex);
    std::erase_if(entries, [&](const auto& entry) {
      if (registered(entry.first.first) == entry.second->group) return false;
      ended.push_back(entry.second);
      return true;
    });
    return ended;
  }
};

// Never destroyed, because gloo and NCCL may be destroyed earlier at the end of the process.
Groups& groups() {
  static auto& groups = *new Groups;
  return groups;
}

}  // namespace

GroupPtr named_group(const std::string& name) {
  GroupPtr group = registered(name);
  if (!group) {
    throw Error(ErrorKind::kUsage, "comm",
                "no process group is registered under the name \"" + name +
                    "\" in this process: pass the group_name of a group that init_process_group or new_group has made "
                    "and destroy_process_group has not ended");
  }
  return group;
}

std::shared_ptr<Communicator> c10d_communicator(const std::string& group_name, at::Device device, Seconds timeout) {
  const GroupPtr group = named_group(group_name);
  groups().take_ended();
  std::shared_ptr<Entry> entry;
  {
    const std::lock_guard lock(groups().mutex);
    std::shared_ptr<Entry>& found = groups().entries[{group_name, device.str()}];
    if (!found) {
      found = std::make_shared<Entry>();
      found->group = group;
    }
    entry = found;
  }
  const std::lock_guard lock(entry->mutex);
  if (!entry->comm) entry->comm = make_c10d_communicator(group, device, timeout);
  return entry->comm;
}

std::shared_ptr<Communicator> made_communicator(const std::string& group_name, at::Device device) {
  const GroupPtr group = named_group(group_name);
  std::shared_ptr<Entry> entry;
  {
    const std::lock_guard lock(groups().mutex);
    const auto found = groups().entries.find({group_name, device.str()});
    if (found == groups().entries.end() || found->second->group != group) return nullptr;
    entry = found->second;
  }
  const std::unique_lock lock(entry->mutex, std::try_to_lock);
  return lock ? entry->comm : nullptr;
}

void release_ended_groups() {
  groups().take_ended();
  c10d_internal::forget_ended_groups();
}

}  // namespace annulus
