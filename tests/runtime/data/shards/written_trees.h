// Groups of rollouts as prefix trees, by the definition of docs/reference/formats.md, and as documents: a trie, built
// token by token. Independent of python/tokenizer and of the code that reads trees. Used by tests of data and training.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/runtime/data/shards/token_writers.h"

namespace annulus {

// One text, and the weight in the loss of each of its tokens.
struct Rollout {
  Ids ids;
  std::vector<float> weights;
};
using Group = std::vector<Rollout>;

class WrittenTrees {
 public:
  explicit WrittenTrees(const std::vector<Group>& groups) {
    for (const Group& group : groups) {
      std::map<std::pair<int64_t, int64_t>, Node> roots;
      for (const Rollout& rollout : group) {
        Node* node = nullptr;
        for (size_t i = 0; i + 1 < rollout.ids.size(); ++i) {
          node = node == nullptr ? &roots[{rollout.ids[0], rollout.ids[1]}] : &node->next[rollout.ids[i + 1]];
          node->weight += rollout.weights[i + 1];
        }
      }
      documents_.emplace_back();
      for (const auto& [tokens, node] : roots) write(tokens.first, tokens.second, node, kRoot);
    }
  }

  std::string shard() const { return annulus_shard(documents_, 2, 256, std::string(16, '\x5a'), weights_, branches_); }
  size_t tokens() const { return weights_.size(); }
  size_t branches() const { return branches_.size(); }

 private:
  // An input, which is known from the node before it, and its target, by which that node knows it.
  struct Node {
    float weight = 0;
    std::map<int64_t, Node> next;
  };

  void put(int64_t id, float weight) {
    documents_.back().push_back(id);
    weights_.push_back(weight);
  }

  // Writes a node and all that goes on from it: the first of these in the same branch, the others behind it.
  void write(int64_t input, int64_t target, const Node& first, uint64_t after) {
    branches_.push_back({weights_.size(), after});
    put(input, 0);
    std::vector<std::pair<uint64_t, std::pair<int64_t, const Node*>>> passed;  // inputs, their targets and nodes
    for (const Node* node = &first; node != nullptr;) {
      passed.push_back({weights_.size() - 1, {target, node}});
      put(target, node->weight);
      const Node* goes_on = nullptr;
      if (!node->next.empty()) target = node->next.begin()->first, goes_on = &node->next.begin()->second;
      node = goes_on;
    }
    for (size_t i = passed.size(); i-- > 0;) {
      const auto& [place, token] = passed[i];
      bool is_first = true;
      for (const auto& [id, node] : token.second->next) {
        if (!std::exchange(is_first, false)) write(token.first, id, node, place);
      }
    }
  }

  Documents documents_;
  std::vector<float> weights_;
  std::vector<WrittenBranch> branches_;
};

inline std::string shard_of_documents(const std::vector<Group>& groups) {
  Documents documents;
  std::vector<float> weights;
  for (const Group& group : groups) {
    for (const Rollout& rollout : group) {
      documents.push_back(rollout.ids);
      weights.insert(weights.end(), rollout.weights.begin(), rollout.weights.end());
    }
  }
  return annulus_shard(documents, 2, 256, std::string(16, '\x5a'), weights);
}

// Groups that have what trees can have: prompts with completions that begin alike, several turns, equal rollouts, one
// that is the beginning of another, two without a common token, and single ones. `weights` are those of a rollout's
// completion, in turn; prompts have 0, or 1 with `prompts_count`. No token is above 255, and none is 0.
inline std::vector<Group> drawn_groups(const std::vector<float>& weights, bool prompts_count = false) {
  uint32_t state = 11;
  const auto draw = [&](uint32_t below) {
    state = state * 1664525 + 1013904223;
    return (state >> 16) % below;
  };
  const auto text = [&](uint32_t length) {
    Ids ids;
    while (ids.size() < length) ids.push_back(1 + draw(255));
    return ids;
  };
  const auto joined_ids = [](Ids a, const Ids& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  };
  std::vector<Group> groups;
  size_t next = 0;
  const auto add = [&](Group& group, const Ids& prompt, const Ids& completion) {
    Rollout& rollout = group.emplace_back();
    rollout.ids = joined_ids(prompt, completion);
    rollout.weights.assign(prompt.size(), prompts_count ? 1.0F : 0.0F);
    rollout.weights.resize(rollout.ids.size(), weights[next++ % weights.size()]);
  };
  for (int g = 0; g < 7; ++g) {
    Group& group = groups.emplace_back();
    const Ids prompt = text(4 + draw(8)), thought = text(3 + draw(4)), longer = joined_ids(thought, text(5));
    for (int i = 0; i < 4; ++i) add(group, prompt, text(1 + draw(7)));
    for (int i = 0; i < 2; ++i) add(group, prompt, joined_ids(thought, text(2 + draw(5))));
    for (int i = 0; i < 2; ++i) add(group, prompt, longer);
    add(group, prompt, joined_ids(longer, text(3)));
    add(group, joined_ids(prompt, longer), text(4));  // another turn
    if (g % 3 == 0) add(group, text(3), text(3));
  }
  add(groups.emplace_back(), text(5), text(6));
  return groups;
}

}  // namespace annulus
