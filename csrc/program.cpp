#include "program.h"

#include <cstring>
#include <stdexcept>

namespace octavo {
namespace {

template <class... Parts> [[noreturn]] void fail(Parts... parts) {
    std::string text;
    auto add = [&](auto part) {
        if constexpr (std::is_arithmetic_v<decltype(part)>) text += std::to_string(part);
        else text += part;
    };
    (add(parts), ...);
    throw std::invalid_argument(text);
}

const float* or_null(const Vector& v) { return v.empty() ? nullptr : v.data(); }

}  // namespace

// ---- recording ----------------------------------------------------------------------------------------------------

Program::Program(std::shared_ptr<Cpu> cpu, const KVLayout& layout, int groups, int heads, int row_tile)
    : cpu_(std::move(cpu)), layout_(layout), heads_(heads), row_tile_(row_tile), windows_(groups, -1),
      block_of_(groups) {
    if (layout.block_size < 1 || layout.kv_heads < 1 || layout.head_dim < 1 || layout.layers_per_block < 1 || groups < 1)
        fail("every number of the cache's layout must be positive");
    if (layout.type == KVType::i8 && layout.head_dim % 2)
        fail("K and V in int8 need an even head_dim, not ", layout.head_dim);
    if (heads < 1 || heads % layout.kv_heads)
        fail(heads, " query heads are not a multiple of ", layout.kv_heads, " KV heads");
    if (row_tile < 1) fail("row_tile must be positive");
}

int Program::buffer(int64_t width, Extent extent) {
    if (width < 1) fail("a value needs a positive width");
    values_.push_back({width, round_up(width, 16), extent, std::make_shared<Buffer>()});
    return int(values_.size()) - 1;
}

void Program::segment(bool logit_rows) { segments_.push_back({logit_rows, {}}); }

const Program::Value& Program::value(int id) const {
    if (id < 0 || id >= int(values_.size())) fail("there is no value ", id);
    return values_[id];
}

void Program::expect_width(int id, int64_t width, const char* what) const {
    if (value(id).width != width) fail(what, " has width ", value(id).width, ", not ", width);
}

void Program::add(Op op) {
    if (segments_.empty()) segment(false);
    segments_.back().ops.push_back(std::move(op));
}

// Memory of a value's row `span.first`.
float* Program::at(int id, Span span) const {
    const Value& v = values_[id];
    int64_t row = v.extent == Extent::tile ? 0 : span.first;
    return (float*)v.memory->data() + row * v.ld;
}

void Program::embed(int out, std::shared_ptr<Weight> table, float scale) {
    expect_width(out, table->K, "embed: the output");
    embed_rows_ = embed_rows_ ? std::min(embed_rows_, table->N) : table->N;
    add([=, this](const Step& step, Span span) {
        constexpr int64_t piece = 16;
        float* y = at(out, span);
        int64_t ld = values_[out].ld;
        cpu_->threads.parallel_for((span.count() + piece - 1) / piece, [&](int64_t i, int) {
            int64_t from = i * piece, n = std::min(piece, span.count() - from);
            embed_rows(*table, step.tokens + span.first + from, n, scale, y + from * ld, ld);
        });
    });
}

void Program::norm(int out, int x, Vector weight, float eps, int residual) {
    int64_t width = int64_t(weight.size());
    expect_width(x, width, "norm: the input");
    expect_width(out, width, "norm: the output");
    if (residual >= 0) expect_width(residual, width, "norm: the residual");
    add([=, this, weight = std::move(weight)](const Step&, Span span) {
        octavo::norm(cpu_->threads, at(x, span), values_[x].ld, span.count(), width, weight.data(), eps,
                     residual < 0 ? nullptr : at(residual, span), residual < 0 ? 0 : values_[residual].ld,
                     at(out, span), values_[out].ld);
    });
}

void Program::linear(int out, int x, std::vector<std::shared_ptr<Weight>> parts, Vector bias, int residual) {
    int64_t width = 0;
    if (parts.empty()) fail("linear: no weights");
    for (const auto& w : parts) {
        expect_width(x, w->K, "linear: the input");
        width += w->N;
    }
    expect_width(out, width, "linear: the output");
    if (residual >= 0) expect_width(residual, width, "linear: the residual");
    if (!bias.empty() && int64_t(bias.size()) != width) fail("linear: the bias has ", bias.size(), " items, not ", width);
    add([=, this, bias = std::move(bias)](const Step&, Span span) {
        std::vector<const Weight*> raw;
        for (const auto& w : parts) raw.push_back(w.get());
        gemm(cpu_->threads, at(x, span), values_[x].ld, span.count(), raw.data(), int(raw.size()), or_null(bias),
             residual < 0 ? nullptr : at(residual, span), residual < 0 ? 0 : values_[residual].ld, at(out, span),
             values_[out].ld, cpu_->mode, cpu_->gemm);
    });
}

int Program::rope(const Vector& inv_freq, float scale) {
    for (size_t i = 0; i < ropes_.size(); i++)
        if (ropes_[i].inv_freq == inv_freq && ropes_[i].scale == scale) return int(i);
    ropes_.emplace_back();
    ropes_.back().inv_freq = inv_freq;
    ropes_.back().scale = scale;
    return int(ropes_.size()) - 1;
}

void Program::rope_write(int out, int qkv, int group, int place, Vector inv_freq, float scale, Vector q_norm,
                         Vector k_norm, float eps) {
    int64_t hd = layout_.head_dim;
    int half = int(inv_freq.size());
    expect_width(qkv, (heads_ + 2 * layout_.kv_heads) * hd, "rope_write: the input");
    expect_width(out, heads_ * hd, "rope_write: the output");
    if (2 * half > hd) fail("rope_write: ", half, " frequencies rotate more than head_dim ", hd);
    for (const Vector* w : {&q_norm, &k_norm})
        if (!w->empty() && int64_t(w->size()) != hd) fail("rope_write: a norm has ", w->size(), " items, not ", hd);
    if (group < 0 || group >= int(windows_.size()) || place < 0 || place >= layout_.layers_per_block)
        fail("rope_write: no layer at group ", group, ", place ", place);
    int turn = rope(inv_freq, scale);
    add([=, this, q_norm = std::move(q_norm), k_norm = std::move(k_norm)](const Step& step, Span span) {
        RopeWrite op{heads_, half, or_null(q_norm), or_null(k_norm), eps};
        octavo::rope_write(cpu_->threads, cpu_->rope, op, layout_, step.blocks, place,
                           block_of_[group].data() + span.first, step.positions + span.first, span.count(),
                           at(qkv, span), values_[qkv].ld, (float*)ropes_[turn].angles.data() + span.first * 2 * half,
                           at(out, span), values_[out].ld);
    });
}

void Program::attend(int out, int q, int group, int place, float scale, int window, float softcap) {
    expect_width(q, int64_t(heads_) * layout_.head_dim, "attend: the input");
    expect_width(out, int64_t(heads_) * layout_.head_dim, "attend: the output");
    if (window < 0) fail("attend: window ", window, " is negative");
    if (group < 0 || group >= int(windows_.size()) || place < 0 || place >= layout_.layers_per_block)
        fail("attend: no layer at group ", group, ", place ", place);
    int& widest = windows_[group];
    widest = widest == 0 || window == 0 ? 0 : std::max(widest, window);
    add([=, this](const Step& step, Span span) {
        Attention op{heads_, scale, window, softcap};
        Rows rows{step.positions, step.starts, step.S};
        octavo::attend(cpu_->threads, cpu_->attention, op, layout_, step.blocks, place, step.tables[group], rows,
                       span.first, span.last, at(q, span), values_[q].ld, at(out, span), values_[out].ld);
    });
}

void Program::gate(int out, int x, const std::string& activation) {
    int64_t width = value(out).width;
    expect_width(x, 2 * width, "gate: the input");
    if (activation != "silu" && activation != "gelu_tanh") fail("gate: unknown activation '", activation, "'");
    Activation act = activation == "silu" ? Activation::silu : Activation::gelu_tanh;
    add([=, this](const Step&, Span span) {
        octavo::gate(cpu_->threads, at(x, span), values_[x].ld, span.count(), width, act, at(out, span),
                     values_[out].ld);
    });
}

void Program::pick(int out, int x) {
    expect_width(out, value(x).width, "pick: the output");
    if (value(x).extent != Extent::tokens) fail("pick: the input must have a row for each token");
    add([=, this](const Step& step, Span span) {
        for (int64_t r = span.first; r < span.last; r++) {
            int64_t m = step.logits_at[r];
            std::memcpy(at(out, {r, r}), at(x, {m, m}), sizeof(float) * size_t(values_[x].width));
        }
    });
}

void Program::output(int x, float softcap) {
    if (value(x).extent != Extent::logits) fail("output: the logits must have a row for each wanted one");
    if (output_ >= 0) fail("output: there is one already");
    output_ = x;
    vocabulary_ = value(x).width;
    values_[x].ld = vocabulary_;  // callers get it as a plain array
    if (softcap == 0) return;
    add([=, this](const Step&, Span span) {
        soft_cap(cpu_->threads, at(x, span), span.count() * vocabulary_, softcap);
    });
}

// ---- running ------------------------------------------------------------------------------------------------------

void Program::check_table(const Step& step, int64_t s, size_t group) const {
    const Table& table = step.tables[group];
    int64_t first = step.positions[step.starts[s]], last = step.positions[step.starts[s + 1] - 1];
    int64_t low = table.offsets[s], high = table.offsets[s + 1];
    if (low < 0 || high < low || high > table.size)
        fail("table of group ", group, ": row ", s, " has offsets ", low, "..", high, " of ", table.size, " ids");
    int64_t seen = windows_[group] > 0 ? std::max<int64_t>(0, first + 1 - windows_[group]) : 0;
    if (windows_[group] < 0) seen = first;  // written only
    if (last / layout_.block_size >= high - low)
        fail("table of group ", group, ": row ", s, " reaches position ", last, ", its ", high - low,
             " blocks of ", layout_.block_size, " do not");
    for (int64_t b = seen / layout_.block_size; b <= last / layout_.block_size; b++) {
        int64_t id = table.ids[low + b];
        if (id < 0 || id >= step.pool)
            fail("table of group ", group, ": block ", b, " of row ", s, " is ", id, ", the pool has ", step.pool);
    }
}

void Program::check_row(const Step& step, int64_t s) const {
    int64_t from = step.starts[s], to = step.starts[s + 1];
    if (to < from || to > step.M) fail("starts: row ", s, " is tokens ", from, "..", to, " of ", step.M);
    if (from == to) return;
    if (step.positions[from] < 0) fail("positions: row ", s, " starts at ", step.positions[from]);
    // The last position stays below 2^31 - 64, so that tiles' ends do not overflow.
    if (step.positions[from] > 0x7fffff00 - (to - from)) fail("positions: row ", s, " reaches beyond 2^31");
    for (int64_t m = from + 1; m < to; m++)
        if (step.positions[m] != step.positions[m - 1] + 1) fail("positions: row ", s, " is not consecutive");
    for (size_t g = 0; g < step.tables.size(); g++) check_table(step, s, g);
}

void Program::check(const Step& step) const {
    if (output_ < 0) fail("the program declares no output");
    if (step.tables.size() != windows_.size())
        fail("there are ", step.tables.size(), " tables for ", windows_.size(), " layer groups");
    if (step.starts[0] != 0 || step.starts[step.S] != step.M)
        fail("starts must run from 0 to the number of tokens, ", step.M);
    for (int64_t s = 0; s < step.S; s++) check_row(step, s);
    for (int64_t m = 0; m < step.M; m++)
        if (step.tokens[m] < 0 || (embed_rows_ && step.tokens[m] >= embed_rows_))
            fail("token id ", step.tokens[m], " is outside the vocabulary of ", embed_rows_);
    for (int64_t r = 0; r < step.R; r++)
        if (step.logits_at[r] < 0 || step.logits_at[r] >= step.M)
            fail("logits_at: ", step.logits_at[r], " is not one of ", step.M, " tokens");
}

// What all layers share: memory, the block of each token, and the angles of the rotary embeddings.
void Program::prepare(const Step& step) {
    for (Value& v : values_) {
        int64_t rows = v.extent == Extent::logits ? step.R : step.M;
        if (v.extent == Extent::tile) rows = std::min(rows, row_tile_);
        size_t bytes = size_t(rows * v.ld) * sizeof(float);
        if (bytes <= v.memory->size()) continue;
        if (v.memory->size()) bytes += bytes / 4;  // it grew once and may again
        v.memory = std::make_shared<Buffer>();     // a caller may still hold the last result
        v.memory->reserve(bytes);
    }
    for (size_t g = 0; g < step.tables.size(); g++) {
        auto& blocks = block_of_[g];
        blocks.resize(size_t(step.M));
        const Table& table = step.tables[g];
        for (int64_t s = 0; s < step.S; s++)
            for (int64_t m = step.starts[s]; m < step.starts[s + 1]; m++)
                blocks[size_t(m)] = table.ids[table.offsets[s] + step.positions[m] / layout_.block_size];
    }
    for (Rope& rope : ropes_) {
        int half = int(rope.inv_freq.size());
        rope_angles(cpu_->threads, step.positions, step.M, rope.inv_freq.data(), half, rope.scale,
                    floats(rope.angles, step.M * 2 * half));
    }
}

std::shared_ptr<Buffer> Program::run(const Step& step) {
    std::lock_guard lock(cpu_->busy);
    FloatMode mode;
    check(step);
    prepare(step);
    for (const Segment& segment : segments_) {
        int64_t rows = segment.logit_rows ? step.R : step.M;
        // Tiles of about equal size: a last one of a few rows would read all weights for them alone.
        int64_t tiles = std::max<int64_t>(1, segment.logit_rows ? 1 : (rows + row_tile_ - 1) / row_tile_);
        int64_t tile = std::max<int64_t>(1, (rows + tiles - 1) / tiles);
        for (int64_t first = 0; first < rows; first += tile)
            for (const Op& op : segment.ops) op(step, {first, std::min(rows, first + tile)});
    }
    return values_[output_].memory;
}

int64_t Program::workspace_bytes() const {
    int64_t bytes = 0;
    for (const Value& v : values_) bytes += int64_t(v.memory->size());
    return bytes;
}

}  // namespace octavo
