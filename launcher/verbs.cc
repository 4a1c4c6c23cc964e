// The table of the verbs of the program annulus.
#include "launcher/verb.h"

namespace annulus {

const std::vector<VerbEntry>& verbs() {
  static const std::vector<VerbEntry> table = {
      {"launch", "start, watch and stop the ranks of any verb", false, make_launch_verb},
      {"train", "train a model: one rank's program, also under plain mpirun or srun", true, make_train_verb},
      {"sample", "write text with a model", false, make_sample_verb, true},
      {"checkpoint", "show and verify checkpoints, and merge their weights into safetensors", false,
       make_checkpoint_verb, true},
      {"inspect", "show what a run or a folder in Hugging Face's layout is, and what it costs", false,
       make_inspect_verb, true},
      {"export", "write a run's model as a folder in Hugging Face's layout", false, make_export_verb, true},
      {"tokenize", "make shards of tokens from text, show them, check them", false, make_tokenize_verb, true},
      {"pack", "find or make the row indexes of a configuration's tokens, and count what is in them", false,
       make_pack_verb, true},
      {"attend", "compute exact attention over tensors in a safetensors file", true, make_attend_verb},
      {"logits", "compute a model's logits, loss and gradients for tokens in a safetensors file", true,
       make_logits_verb},
      {"plan", "make a plan for any number of ranks, prove it, and show what it costs", false, make_plan_verb, true},
      {"topology", "show this machine, other hosts or a description of them: rings, and where ranks go", false,
       make_topology_verb},
      {"bench", "measure, side by side with a baseline, in one run", true, nullptr, false, "annulus_bench"},
      {"doctor", "check this host or a list of hosts, and show what is wrong and the remedy", false, make_doctor_verb},
      {"selftest", "check that ranks start, exchange, fail and stop as they should", true, make_selftest_verb},
      {"version", "print the version", false, make_version_verb},
      {.name = "host", .help = "", .ranks = false, .make = make_host_verb, .hidden = true},
  };
  return table;
}

}  // namespace annulus
