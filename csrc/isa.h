// Which of the instruction sets that Octavo has modules for this machine (and its operating system) runs.
#pragma once

#include <string>
#include <vector>

namespace octavo {

// Names out of "avx512", "avxvnni", "v3", "neon"; "scalar" always.  Best first.
std::vector<std::string> runnable_isas();

}  // namespace octavo
