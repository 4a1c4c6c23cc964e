// See network.h.
#include "launcher/network/network.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <iterator>
#include <utility>

#include "common/environment.h"
#include "common/error.h"
#include "common/names.h"
#include "common/text.h"

namespace annulus {
namespace {

constexpr const char* kInterfaces = "ANNULUS_INTERFACES";
constexpr const char* kHcas = "ANNULUS_HCAS";
constexpr const char* kRankHca = "ANNULUS_RANK_HCA";

// For a variable that annulus sets, the variable that MPI refuses to have beside it.
constexpr std::array<std::pair<std::string_view, std::string_view>, 2> kOpposites = {{
    {"OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"},
    {"OMPI_MCA_btl_openib_if_include", "OMPI_MCA_btl_openib_if_exclude"},
}};

std::vector<std::string> names_in(std::string_view list) {
  return list.empty() ? std::vector<std::string>{} : split(list, ',');
}

bool is_name(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' ||
           c == '.' || c == '@';
  });
}

bool is_port(std::string_view text) {
  return !text.empty() && text.size() <= 3 && text.front() != '0' &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

}  // namespace

Network parse_network(std::string_view interfaces, std::string_view hcas, std::string_view rank_hca,
                      std::string_view where) {
  const auto refuse = [&](const char* what, const char* form, const std::string& got) {
    throw Error(ErrorKind::kUsage, "launcher",
                std::string(where) + ": " + what + " must have the name that the system gives it, " + form +
                    ", not \"" + got +
                    "\"; for patterns and networks, set NCCL's and MPI's own variables, which have precedence");
  };
  Network network{names_in(interfaces), names_in(hcas)};
  for (const std::string& name : network.interfaces) {
    if (!is_name(name)) refuse("an interface", "such as eth0", name);
  }
  for (const std::string& hca : network.hcas) {
    const size_t colon = hca.find(':');
    const bool good = is_name(std::string_view(hca).substr(0, colon)) &&
                      (colon == std::string::npos || is_port(std::string_view(hca).substr(colon + 1)));
    if (!good) refuse("an HCA", "such as mlx5_0 or, for one of its ports, mlx5_0:1", hca);
  }
  network.nearest_hca = index_of_name(rank_hca, {"auto", "nearest"}, "choice of HCAs", where) == 1;
  return network;
}

Network network_from_environment(Network configured) {
  const auto value = [](const char* name) {
    const char* const text = text_from_environment(name);
    return std::string(text == nullptr ? "" : text);
  };
  const std::string choice = value(kRankHca);
  const Network typed = parse_network(value(kInterfaces), value(kHcas), choice.empty() ? "auto" : choice,
                                      "the environment (ANNULUS_...)");
  if (!typed.interfaces.empty()) configured.interfaces = typed.interfaces;
  if (!typed.hcas.empty()) configured.hcas = typed.hcas;
  if (!choice.empty()) configured.nearest_hca = typed.nearest_hca;
  return configured;
}

std::vector<Variable> environment_of(const Network& network) {
  std::vector<Variable> out;
  if (!network.interfaces.empty()) out.push_back({kInterfaces, join(network.interfaces, ",")});
  if (!network.hcas.empty()) out.push_back({kHcas, join(network.hcas, ",")});
  if (network.nearest_hca) out.push_back({kRankHca, "nearest"});
  return out;
}

std::vector<Variable> network_variables(const Network& network, const std::string& nearest) {
  std::vector<Variable> out;
  if (!network.interfaces.empty()) {
    out.push_back({"NCCL_SOCKET_IFNAME", "=" + join(network.interfaces, ",")});
    out.push_back({"OMPI_MCA_btl_tcp_if_include", join(network.interfaces, ",")});
  }
  const std::vector<std::string> hcas =
      network.nearest_hca && !nearest.empty() ? std::vector<std::string>{nearest} : network.hcas;
  if (!hcas.empty()) {
    out.push_back({"NCCL_IB_HCA", "=" + join(hcas, ",")});
    out.push_back({"OMPI_MCA_btl_openib_if_include", join(hcas, ",")});
    std::vector<std::string> devices;
    for (const std::string& hca : hcas) devices.push_back(hca.find(':') == std::string::npos ? hca + ":1" : hca);
    devices.insert(devices.end(), network.interfaces.begin(), network.interfaces.end());
    out.push_back({"UCX_NET_DEVICES", join(devices, ",")});
  }
  return out;
}

Applied settings(const std::vector<Variable>& variables, const std::map<std::string, std::string>& environment) {
  const auto value_of = [&](std::string_view name) {
    const auto found = environment.find(std::string(name));
    return found == environment.end() ? std::string() : found->second;
  };
  Applied applied;
  for (const Variable& variable : variables) {
    std::string_view opposite;
    for (const auto& [name, other] : kOpposites) {
      if (variable.name == name && !value_of(other).empty()) opposite = other;
    }
    if (const std::string own = value_of(variable.name); !own.empty()) {
      const bool same = variable.value == own;
      applied.lines.push_back(variable.name + "=" + own + " is set in the environment" +
                              (same ? "" : " and stays, instead of " + variable.value));
    } else if (!opposite.empty()) {
      applied.lines.push_back(std::string(opposite) + " is set in the environment and stays, instead of " +
                              variable.name + "=" + variable.value);
    } else {
      applied.lines.push_back(variable.name + "=" + variable.value);
      applied.set.push_back(variable);
    }
  }
  return applied;
}

Applied apply_network(const std::vector<Variable>& variables) {
  Applied applied = settings(variables, network_environment());
  for (const Variable& variable : applied.set) setenv(variable.name.c_str(), variable.value.c_str(), 1);
  return applied;
}

bool is_network_variable(std::string_view name) {
  constexpr std::array<std::string_view, 11> kBegin = {
      "NCCL_",         "UCX_",         "OMPI_MCA_btl",  "OMPI_MCA_pml", "OMPI_MCA_mtl",     "OMPI_MCA_oob",
      "OMPI_MCA_coll", "OMPI_MCA_osc", "OMPI_MCA_opal", "PRTE_MCA_oob", "PRTE_MCA_prte_if_"};
  return std::any_of(kBegin.begin(), kBegin.end(), [&](std::string_view begin) { return name.starts_with(begin); });
}

std::map<std::string, std::string> network_environment() { return variables_from_environment(is_network_variable); }

void apply_for_nccl(const std::vector<Variable>& variables, Applied& applied) {
  const auto is_nccls = [](const Variable& variable) { return variable.name.starts_with("NCCL_"); };
  for (const Variable& variable : applied.set) {
    if (is_nccls(variable)) unsetenv(variable.name.c_str());
  }
  std::erase_if(applied.set, is_nccls);
  std::erase_if(applied.lines, [](const std::string& line) { return line.starts_with("NCCL_"); });
  std::vector<Variable> nccls;
  std::copy_if(variables.begin(), variables.end(), std::back_inserter(nccls), is_nccls);
  const Applied again = apply_network(nccls);
  applied.lines.insert(applied.lines.begin(), again.lines.begin(), again.lines.end());
  applied.set.insert(applied.set.begin(), again.set.begin(), again.set.end());
}

}  // namespace annulus
