#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <cstdint>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace octavo {

#if defined(__x86_64__)
namespace {

struct Registers { uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0; };

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
    Registers r;
    if (!__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx)) return {};
    return r;
}

bool has(uint32_t word, std::initializer_list<int> bits) {
    for (int b : bits)
        if (!(word >> b & 1)) return false;
    return true;
}

// Register state that the operating system saves: without it the instructions fault though the CPU has them.
uint64_t saved_state() {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
}

}  // namespace

std::vector<std::string> runnable_isas() {
    std::vector<std::string> isas;
    Registers one = cpuid(1, 0), seven = cpuid(7, 0), seven1 = cpuid(7, 1), ext = cpuid(0x80000001u, 0);
    bool osxsave = has(one.ecx, {27});
    uint64_t state = osxsave ? saved_state() : 0;
    bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6;
    // x86-64-v3: SSE3, SSSE3, FMA, CX16, SSE4.1, SSE4.2, MOVBE, POPCNT, AVX, F16C; BMI1, AVX2, BMI2; LAHF, LZCNT
    bool v3 = ymm && has(one.ecx, {0, 9, 12, 13, 19, 20, 22, 23, 28, 29}) && has(seven.ebx, {3, 5, 8}) &&
              has(ext.ecx, {0, 5});
    bool avx512 = v3 && zmm && has(seven.ebx, {16, 17, 30, 31}) && has(seven.ecx, {11});  // F DQ BW VL; VNNI
    if (avx512) isas.push_back("avx512");
    if (v3 && has(seven1.eax, {4})) isas.push_back("avxvnni");
    if (v3) isas.push_back("v3");
    isas.push_back("scalar");
    return isas;
}

#elif defined(__aarch64__) && defined(__linux__)

std::vector<std::string> runnable_isas() {
    unsigned long caps = getauxval(AT_HWCAP);
    std::vector<std::string> isas;
    if ((caps & HWCAP_ASIMDDP) && (caps & HWCAP_ASIMDHP) && (caps & HWCAP_FPHP)) isas.push_back("neon");
    isas.push_back("scalar");
    return isas;
}

#else

std::vector<std::string> runnable_isas() { return {"scalar"}; }

#endif

}  // namespace octavo
