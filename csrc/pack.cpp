#include "pack.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "panel.h"

namespace octavo {

namespace {

constexpr int64_t kPartBytes = 16 << 20;  // of raw weights between two calls of `read`

Type type_named(const char* name) {
    for (const TypeInfo& t : kTypes)
        if (std::strcmp(t.name, name) == 0) return t.type;
    throw std::invalid_argument(std::string("weight type ") + name + " is not supported");
}

// The type, after a check that its blocks divide K.
Type checked_type(const char* name, int64_t N, int64_t K) {
    Type t = type_named(name);
    if (N < 1 || K < 1) throw std::invalid_argument("a weight matrix needs at least one row and one column");
    if (K % info(t).block)
        throw std::invalid_argument(std::string("a ") + name + " matrix needs rows of a multiple of " +
                                    std::to_string(info(t).block) + " weights, not " + std::to_string(K));
    return t;
}

uint32_t word(const uint8_t* p) {
    uint32_t u;
    std::memcpy(&u, p, 4);
    return u;
}

void put_word(uint8_t* p, uint32_t u) { std::memcpy(p, &u, 4); }

// ---- writing panels ---------------------------------------------------------------------------------------------

// The 32 quants of column n of a group.
OCTAVO_INLINE void put_quants(const PanelLayout& lay, uint8_t* group, int n, const uint8_t* q) {
    if (lay.bits == 8) {
        for (int t = 0; t < 8; t++) put_word(group + t * 64 + n * 4, word(q + t * 4));
        return;
    }
    for (int i = 0; i < 4; i++) {
        uint32_t lo = word(q + i * 8) & 0x0f0f0f0fu, hi = word(q + i * 8 + 4) & 0x0f0f0f0fu;
        put_word(group + i * 64 + n * 4, lo | hi << 4);
    }
    uint8_t* high = group + lay.high();
    if (lay.bits == 5)  // bytes of two columns: four bits each
        for (int t = 0; t < 8; t++) {
            uint32_t u = word(q + t * 4) >> 4 & 0x01010101u;
            high[t * 8 + n / 2] |= uint8_t(((u | u >> 7 | u >> 14 | u >> 21) & 15) << (n % 2 * 4));
        }
    if (lay.bits == 6)
        for (int line = 0; line < 2; line++) {
            uint32_t u = 0;
            for (int s = 0; s < 4; s++) u |= (word(q + line * 16 + s * 4) >> 4 & 0x03030303u) << (2 * s);
            put_word(high + line * 64 + n * 4, u);
        }
}

void put_u16(uint8_t* p, uint16_t u) { std::memcpy(p, &u, 2); }

// One block of column n; `group` counts groups of 32 from the start of the row.
OCTAVO_INLINE void put_block(Type t, const PanelLayout& lay, uint8_t* panel, int64_t group, int n, const Block& b) {
    uint8_t* chunk = panel + group / lay.groups * lay.chunk();
    int first = int(group % lay.groups), groups = info(t).block / 32;
    if (lay.groups == 2) {
        put_u16(chunk + first * 32 + n * 2, b.d);
    } else {
        put_u16(chunk + n * 2, b.d);
        if (lay.minima) put_u16(chunk + 32 + n * 2, b.m);
    }
    if (lay.groups == 8)
        for (int i = 0; i < 8; i++) {
            chunk[64 + i * 32 + n] = lay.minima ? b.sc[i] : b.sc[2 * i];
            chunk[64 + i * 32 + 16 + n] = lay.minima ? b.mn[i] : b.sc[2 * i + 1];
        }
    for (int g = 0; g < groups; g++) put_quants(lay, chunk + lay.header + (first + g) * lay.group, n, b.q + g * 32);
}

template <Type TYPE> void pack_blocks(const Weight& w, const uint8_t* raw, int64_t panel, uint8_t* out) {
    constexpr PanelLayout lay = panel_layout(TYPE);
    constexpr TypeInfo ti = kTypes[int(TYPE)];
    const int64_t row_bytes = w.K / ti.block * ti.bytes;
    std::memset(out, 0, size_t(w.panel_bytes));
    Block b;
    for (int n = 0; n < NR && panel * NR + n < w.N; n++) {
        const uint8_t* row = raw + (panel * NR + n) * row_bytes;
        for (int64_t i = 0; i < w.K / ti.block; i++) {
            unpack_block(TYPE, row + i * ti.bytes, b);
            put_block(TYPE, lay, out, i * (ti.block / 32), n, b);
        }
    }
}

template <class Item> void pack_floats(const Weight& w, const uint8_t* raw, int64_t panel, uint8_t* out) {
    constexpr int64_t item = sizeof(Item);
    const int columns = int(std::min<int64_t>(NR, w.N - panel * NR));
    if (columns < NR || w.panel_bytes > w.K * NR * item) std::memset(out, 0, size_t(w.panel_bytes));
    const uint8_t* rows = raw + panel * NR * w.K * item;
    for (int64_t k = 0; k < w.K; k++, out += NR * item)  // 16 streams in, one out
        for (int n = 0; n < columns; n++) std::memcpy(out + n * item, rows + (n * w.K + k) * item, size_t(item));
}

void pack_panel(const Weight& w, const uint8_t* raw, int64_t panel, uint8_t* out) {
    switch (w.type) {
        case Type::F32: return pack_floats<uint32_t>(w, raw, panel, out);
        case Type::F16:
        case Type::BF16: return pack_floats<uint16_t>(w, raw, panel, out);
        case Type::Q8_0: return pack_blocks<Type::Q8_0>(w, raw, panel, out);
        case Type::Q4_0: return pack_blocks<Type::Q4_0>(w, raw, panel, out);
        case Type::Q4_1: return pack_blocks<Type::Q4_1>(w, raw, panel, out);
        case Type::Q5_0: return pack_blocks<Type::Q5_0>(w, raw, panel, out);
        case Type::Q5_1: return pack_blocks<Type::Q5_1>(w, raw, panel, out);
        case Type::Q4_K: return pack_blocks<Type::Q4_K>(w, raw, panel, out);
        case Type::Q5_K: return pack_blocks<Type::Q5_K>(w, raw, panel, out);
        case Type::Q6_K: return pack_blocks<Type::Q6_K>(w, raw, panel, out);
    }
}

// ---- reading one row back ---------------------------------------------------------------------------------------

uint16_t get_u16(const uint8_t* p) {
    uint16_t u;
    std::memcpy(&u, p, 2);
    return u;
}

void get_quants(const PanelLayout& lay, const uint8_t* group, int n, uint8_t* q) {
    if (lay.bits == 8) {
        for (int t = 0; t < 8; t++) put_word(q + t * 4, word(group + t * 64 + n * 4));
        return;
    }
    const uint8_t* high = group + lay.high();
    for (int t = 0; t < 8; t++) {
        uint32_t u = word(group + t / 2 * 64 + n * 4) >> (t % 2 * 4) & 0x0f0f0f0fu;
        if (lay.bits == 5) {
            uint32_t four = high[t * 8 + n / 2] >> (n % 2 * 4);
            u |= (four & 1) << 4 | (four & 2) << 11 | (four & 4) << 18 | (four & 8) << 25;
        }
        if (lay.bits == 6) u |= (word(high + t / 4 * 64 + n * 4) >> (t % 4 * 2) & 0x03030303u) << 4;
        put_word(q + t * 4, u);
    }
}

// 32 weights of group g of column n.  The order of the roundings is the format's.
void decode_group(const PanelLayout& lay, const uint8_t* panel, int64_t g, int n, float* out) {
    const uint8_t* chunk = panel + g / lay.groups * lay.chunk();
    const int s = int(g % lay.groups);
    uint8_t q[32];
    get_quants(lay, chunk + lay.header + s * lay.group, n, q);
    float d = f16_to_f32(get_u16(chunk + (lay.groups == 2 ? s * 32 : 0) + n * 2));
    if (lay.minima) {
        float m = f16_to_f32(get_u16(chunk + 32 + n * 2));
        if (lay.groups == 8) {
            d = d * float(chunk[64 + s * 32 + n]);
            m = -(m * float(chunk[64 + s * 32 + 16 + n]));
        }
        for (int i = 0; i < 32; i++) out[i] = d * float(q[i]) + m;
    } else if (lay.groups == 8) {
        float lo = d * float(int8_t(chunk[64 + s * 32 + n])), hi = d * float(int8_t(chunk[64 + s * 32 + 16 + n]));
        for (int i = 0; i < 32; i++) out[i] = (i < 16 ? lo : hi) * float(int(q[i]) - 32);
    } else {
        for (int i = 0; i < 32; i++) out[i] = d * float(int(q[i]) - (1 << lay.offset));
    }
}

void decode_row(const Weight& w, int64_t row, float* out) {
    const uint8_t* panel = w.panel(row / NR);
    const int n = int(row % NR);
    if (w.type == Type::F32) {
        for (int64_t k = 0; k < w.K; k++) std::memcpy(out + k, panel + (k * NR + n) * 4, 4);
    } else if (w.type == Type::F16) {
        for (int64_t k = 0; k < w.K; k++) out[k] = f16_to_f32(get_u16(panel + (k * NR + n) * 2));
    } else if (w.type == Type::BF16) {
        for (int64_t k = 0; k < w.K; k++) out[k] = bf16_to_f32(get_u16(panel + (k * NR + n) * 2));
    } else {
        const PanelLayout lay = panel_layout(w.type);
        for (int64_t g = 0; g < w.K / 32; g++) decode_group(lay, panel, g, n, out + g * 32);
    }
}

}  // namespace

int64_t raw_bytes(const char* type, int64_t N, int64_t K) {
    const TypeInfo& t = info(checked_type(type, N, K));
    return N * (K / t.block) * t.bytes;
}

std::unique_ptr<Weight> pack(const char* type, const uint8_t* raw, int64_t N, int64_t K, Threads& threads,
                             Arena& arena, const std::function<void(int64_t)>& read) {
    auto w = std::make_unique<Weight>();
    w->type = checked_type(type, N, K);
    w->N = N;
    w->K = K;
    w->panels = (N + NR - 1) / NR;
    if (is_float(w->type)) {
        w->panel_bytes = (K * NR * info(w->type).bytes + 63) / 64 * 64;
    } else {
        const PanelLayout lay = panel_layout(w->type);
        w->panel_bytes = (K / 32 + lay.groups - 1) / lay.groups * lay.chunk();
    }
    w->nbytes = size_t(w->panels * w->panel_bytes + kPanelSlack);
    w->storage = arena.take(w->nbytes);
    uint8_t* out = w->storage.get();
    std::memset(out + w->panels * w->panel_bytes, 0, kPanelSlack);
    const int64_t panel_raw = NR * (K / info(w->type).block) * info(w->type).bytes;
    const int64_t part = std::max<int64_t>(kPartBytes / panel_raw, 1);
    for (int64_t first = 0; first < w->panels; first += part) {
        const int64_t last = std::min(w->panels, first + part);
        const int64_t piece = std::clamp<int64_t>((last - first) / (threads.count() * 8), 1, 64);
        threads.parallel_for((last - first + piece - 1) / piece, [&](int64_t i, int) {
            for (int64_t p = first + i * piece; p < std::min(last, first + (i + 1) * piece); p++)
                pack_panel(*w, raw, p, out + p * w->panel_bytes);
        });
        if (read) read(std::min(last * panel_raw, raw_bytes(type, N, K)));
    }
    return w;
}

void embed_rows(const Weight& w, const int32_t* ids, int64_t M, float scale, float* y, int64_t ldy) {
    for (int64_t i = 0; i < M; i++) {
        float* out = y + i * ldy;
        decode_row(w, ids[i], out);
        if (scale != 1.0f)
            for (int64_t k = 0; k < w.K; k++) out[k] *= scale;
    }
}

}  // namespace octavo
