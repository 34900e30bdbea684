// The Python module: checks arrays, lets go of the interpreter lock, calls the kernels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>

#include "isa.h"
#include "move.h"
#include "probe.h"
#include "program.h"
#include "sample.h"

namespace nb = nanobind;
using namespace octavo;

namespace {

template <class T> using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using Array2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Blocks = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstBlocks = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T> using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using Out2 = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool ok, const char* message) {
    if (!ok) throw std::invalid_argument(message);
}

KVType kv_type(const std::string& name) {
    if (name == "float32") return KVType::f32;
    if (name == "float16") return KVType::f16;
    if (name == "bfloat16") return KVType::bf16;
    if (name == "int8") return KVType::i8;
    throw std::invalid_argument("unknown KV dtype '" + name + "'");
}

Extent extent(const std::string& name) {
    if (name == "tile") return Extent::tile;
    if (name == "tokens") return Extent::tokens;
    if (name == "logits") return Extent::logits;
    throw std::invalid_argument("unknown extent '" + name + "'");
}

Vector vector_of(const Array<float>& a) { return Vector(a.data(), a.data() + a.shape(0)); }

std::shared_ptr<Weight> pack_weight(Cpu& cpu, const std::string& type, Array<uint8_t> raw, int64_t N, int64_t K,
                                    nb::object read) {
    require(N > 0 && K > 0, "a weight needs positive numbers of rows and columns");
    require(int64_t(raw.shape(0)) == raw_bytes(type.c_str(), N, K), "a weight's bytes do not match its shape and type");
    std::function<void(int64_t)> told;
    if (!read.is_none())
        told = [&read](int64_t bytes) {
            nb::gil_scoped_acquire acquire;
            read(bytes);
        };
    nb::gil_scoped_release release;
    std::lock_guard lock(cpu.busy);
    FloatMode mode;
    return std::shared_ptr<Weight>(pack(type.c_str(), raw.data(), N, K, cpu.threads, cpu.weights, told));
}

nb::object run_program(Program& program, Array<int32_t> tokens, Array<int32_t> positions, Array<int32_t> starts,
                       nb::list tables, Array<int32_t> logits_at, Blocks blocks) {
    require(positions.shape(0) == tokens.shape(0), "positions and tokens differ in length");
    require(starts.shape(0) >= 1, "starts is empty");
    require(int64_t(blocks.shape(1)) == program.layout().block_bytes(), "blocks are not of the layout's size");
    require(uintptr_t(blocks.data()) % 4 == 0, "blocks must be aligned to 4 bytes");
    Step step{int64_t(tokens.shape(0)), int64_t(starts.shape(0)) - 1, int64_t(logits_at.shape(0)), tokens.data(),
              positions.data(), starts.data(), logits_at.data(), {}, blocks.data(), int64_t(blocks.shape(0))};
    std::vector<Array<int32_t>> alive;  // arrays stay where they are while the lock is not held
    for (nb::handle entry : tables) {
        nb::tuple pair = nb::cast<nb::tuple>(entry);
        require(pair.size() == 2, "a table is a pair (ids, offsets)");
        auto ids = nb::cast<Array<int32_t>>(pair[0]), offsets = nb::cast<Array<int32_t>>(pair[1]);
        require(int64_t(offsets.shape(0)) == step.S + 1, "a table's offsets and starts differ in length");
        step.tables.push_back({ids.data(), offsets.data(), int64_t(ids.shape(0))});
        alive.push_back(ids);
        alive.push_back(offsets);
    }
    std::shared_ptr<Buffer> memory;
    {
        nb::gil_scoped_release release;
        memory = program.run(step);
    }
    auto* owner = new std::shared_ptr<Buffer>(memory);
    nb::capsule capsule(owner, [](void* p) noexcept { delete (std::shared_ptr<Buffer>*)p; });
    size_t shape[2] = {size_t(step.R), size_t(program.vocabulary())};
    return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(memory->data(), 2, shape, capsule));
}

void move(Cpu& cpu, ConstBlocks source, Blocks target, Array2<int64_t> pairs) {
    require(source.shape(1) == target.shape(1), "source and target blocks differ in size");
    require(pairs.shape(1) == 2, "pairs must be [n, 2]");
    const uint8_t *a = source.data(), *b = target.data();
    require(a == b || a + source.nbytes() <= b || b + target.nbytes() <= a, "the pools overlap in part");
    for (size_t i = 0; i < pairs.shape(0); i++) {
        int64_t from = pairs(i, 0), to = pairs(i, 1);
        if (from < 0 || from >= int64_t(source.shape(0)) || to < 0 || to >= int64_t(target.shape(0)))
            throw std::out_of_range("move " + std::to_string(from) + " -> " + std::to_string(to) + " is outside the pools of " +
                                    std::to_string(source.shape(0)) + " and " + std::to_string(target.shape(0)));
    }
    nb::gil_scoped_release release;
    std::lock_guard lock(cpu.busy);
    move_blocks(cpu.threads, a, target.data(), int64_t(source.shape(1)), pairs.data(), int64_t(pairs.shape(0)));
}

// Checks ragged arrays of a sample batch against the vocabulary.
template <class V>
Ragged<V> ragged(const Array<int32_t>& offsets, const Array<int32_t>& ids, const Array<V>& values, size_t samples,
                 int64_t vocabulary) {
    require(offsets.shape(0) == samples + 1, "offsets must have one more item than there are samples");
    require(ids.shape(0) == values.shape(0), "ids and values differ in length");
    require(offsets(0) == 0 && offsets(samples) == int64_t(ids.shape(0)), "offsets must run from 0 to the number of ids");
    for (size_t s = 0; s < samples; s++) require(offsets(s) <= offsets(s + 1), "offsets must not fall");
    for (size_t i = 0; i < ids.shape(0); i++)
        if (ids(i) < 0 || ids(i) >= vocabulary)
            throw std::invalid_argument("token id " + std::to_string(ids(i)) + " is outside the vocabulary of " +
                                        std::to_string(vocabulary));
    return {offsets.data(), ids.data(), values.data()};
}

// Outputs as allocated by Python; top_ids and top_logprobs are [samples, top].
Drawn drawn(Out<int32_t>& token, Out<float>& logprob, Out<int32_t>& rank, Out2<int32_t>& top_ids,
            Out2<float>& top_logprobs, size_t samples, int64_t vocabulary) {
    require(token.shape(0) == samples && logprob.shape(0) == samples && rank.shape(0) == samples &&
                top_ids.shape(0) == samples && top_logprobs.shape(0) == samples,
            "outputs must have one item for each sample");
    require(top_ids.shape(1) == top_logprobs.shape(1) && int64_t(top_ids.shape(1)) <= vocabulary,
            "outputs for the best tokens differ in width, or are wider than the vocabulary");
    return {token.data(), logprob.data(), rank.data(), top_ids.data(), top_logprobs.data(), int64_t(top_ids.shape(1))};
}

void sample_tokens(Cpu& cpu, Array2<float> logits, Array<int32_t> row, Array<float> temperature, Array<int32_t> top_k,
                   Array<float> top_p, Array<float> min_p, Array<float> repetition, Array<float> presence,
                   Array<float> frequency, Array<uint64_t> seed, Array<int32_t> branch, Array<int32_t> position,
                   Array<int32_t> logprobs, Array<int32_t> bias_offsets, Array<int32_t> bias_ids,
                   Array<float> bias_values, Array<int32_t> history_offsets, Array<int32_t> history_ids,
                   Array<int32_t> history_counts, Array<int32_t> mask, Array2<uint32_t> masks, Out<int32_t> token,
                   Out<float> logprob, Out<int32_t> rank, Out2<int32_t> top_ids, Out2<float> top_logprobs) {
    size_t n = row.shape(0);
    int64_t R = int64_t(logits.shape(0)), V = int64_t(logits.shape(1));
    for (size_t length : {temperature.shape(0), top_k.shape(0), top_p.shape(0), min_p.shape(0), repetition.shape(0),
                          presence.shape(0), frequency.shape(0), seed.shape(0), branch.shape(0), position.shape(0),
                          logprobs.shape(0), mask.shape(0)})
        require(length == n, "all parameters must have one item for each sample");
    require(n == 0 || V > 0, "the logits have no columns");
    for (size_t s = 0; s < n; s++) {
        require(row(s) >= 0 && row(s) < R, "a sample's row is outside the logits");
        require(temperature(s) >= 0, "a temperature is negative or NaN");
        require(top_p(s) > 0 && min_p(s) >= 0 && min_p(s) <= 1, "a top_p is not above 0, or a min_p not in 0..1");
        require(repetition(s) > 0, "a repetition penalty is not positive");
        require(mask(s) >= -1 && mask(s) < int64_t(masks.shape(0)), "a sample's mask is outside the masks");
    }
    require(masks.shape(0) == 0 || int64_t(masks.shape(1)) >= (V + 31) / 32, "masks have fewer bits than there are tokens");
    Samples samples{int64_t(n), row.data(), temperature.data(), top_k.data(), top_p.data(), min_p.data(),
                    repetition.data(), presence.data(), frequency.data(), seed.data(), branch.data(), position.data(),
                    logprobs.data(), ragged(bias_offsets, bias_ids, bias_values, n, V),
                    ragged(history_offsets, history_ids, history_counts, n, V), mask.data(), masks.data(),
                    int64_t(masks.shape(1))};
    Drawn out = drawn(token, logprob, rank, top_ids, top_logprobs, n, V);
    nb::gil_scoped_release release;
    std::lock_guard lock(cpu.busy);
    FloatMode mode;
    sample(cpu.threads, cpu.sampling, logits.data(), V, samples, out);
}

void score_tokens(Cpu& cpu, Array2<float> logits, Array<int32_t> targets, Out<int32_t> token, Out<float> logprob,
                  Out<int32_t> rank, Out2<int32_t> top_ids, Out2<float> top_logprobs) {
    int64_t R = int64_t(logits.shape(0)), V = int64_t(logits.shape(1));
    require(int64_t(targets.shape(0)) == R, "there must be one target for each row of logits");
    for (int64_t r = 0; r < R; r++) require(targets(r) >= 0 && targets(r) < V, "a target is outside the vocabulary");
    Drawn out = drawn(token, logprob, rank, top_ids, top_logprobs, size_t(R), V);
    nb::gil_scoped_release release;
    std::lock_guard lock(cpu.busy);
    FloatMode mode;
    score(cpu.threads, cpu.sampling, logits.data(), R, V, targets.data(), out);
}

double read_rate(Array<uint8_t> data, int threads) {
    require(data.shape(0) > 0, "there is nothing to read");
    nb::gil_scoped_release release;
    return probe_read(data.data(), int64_t(data.shape(0)), threads);
}

double fma_rate(int64_t iterations, int threads) {
    require(iterations > 0, "iterations must be positive");
    nb::gil_scoped_release release;
    return probe_fma(iterations, threads);
}

void bind_program(nb::module_& m) {
    using namespace nb::literals;
    using Floats = std::optional<Array<float>>;
    auto items = [](const Floats& v) { return v ? vector_of(*v) : Vector(); };
    nb::class_<Program>(m, "Program")
        .def("__init__",
             [](Program* self, std::shared_ptr<Cpu> cpu, int block_size, int kv_heads, int head_dim,
                int layers_per_block, const std::string& dtype, int groups, int heads, int row_tile) {
                 KVLayout layout{block_size, kv_heads, head_dim, layers_per_block, kv_type(dtype)};
                 new (self) Program(std::move(cpu), layout, groups, heads, row_tile);
             })
        .def("buffer", [](Program& p, int64_t width, const std::string& e) { return p.buffer(width, extent(e)); })
        .def("segment", &Program::segment)
        .def("embed", &Program::embed)
        .def("norm", [](Program& p, int out, int x, Array<float> weight, float eps,
                        int residual) { p.norm(out, x, vector_of(weight), eps, residual); })
        .def("linear", [items](Program& p, int out, int x, std::vector<std::shared_ptr<Weight>> parts, Floats bias,
                               int residual) { p.linear(out, x, std::move(parts), items(bias), residual); },
             "out"_a, "x"_a, "parts"_a, "bias"_a.none(), "residual"_a)
        .def("rope_write",
             [items](Program& p, int out, int qkv, int group, int place, Array<float> inv_freq, float scale,
                     Floats q_norm, Floats k_norm, float eps) {
                 p.rope_write(out, qkv, group, place, vector_of(inv_freq), scale, items(q_norm), items(k_norm), eps);
             },
             "out"_a, "qkv"_a, "group"_a, "place"_a, "inv_freq"_a, "scale"_a, "q_norm"_a.none(), "k_norm"_a.none(),
             "eps"_a)
        .def("attend", &Program::attend)
        .def("gate", &Program::gate)
        .def("pick", &Program::pick)
        .def("output", &Program::output)
        .def("run", run_program, "tokens"_a.noconvert(), "positions"_a.noconvert(), "starts"_a.noconvert(), "tables"_a,
             "logits_at"_a.noconvert(), "blocks"_a.noconvert())
        .def_prop_ro("workspace_bytes", &Program::workspace_bytes);
}

}  // namespace

NB_MODULE(OCTAVO_MODULE, m) {
    using namespace nb::literals;
    m.attr("isa") = OCTAVO_ISA;
    m.def("runnable_isas", [] {
        nb::list names;
        for (const auto& name : runnable_isas()) names.append(name.c_str());
        return names;
    });
    nb::class_<Cpu>(m, "Cpu")
        .def("__init__",
             [](Cpu* self, int threads, bool exact) { new (self) Cpu(threads, exact ? Mode::exact : Mode::fast); },
             "threads"_a, "exact"_a)
        .def_prop_ro("threads", [](Cpu& cpu) { return cpu.threads.count(); })
        .def("pack", pack_weight, "type"_a, "raw"_a, "rows"_a, "cols"_a, "read"_a = nb::none())
        .def("move", move, "source"_a.noconvert(), "target"_a.noconvert(), "pairs"_a)
        .def("sample", sample_tokens)
        .def("score", score_tokens);
    nb::class_<Weight>(m, "Weight")
        .def_ro("rows", &Weight::N)
        .def_ro("cols", &Weight::K)
        .def_ro("nbytes", &Weight::nbytes);
    bind_program(m);
    m.def("uniform", &uniform);
    m.def("probe_read", read_rate, "data"_a.noconvert(), "threads"_a);
    m.def("probe_fma", fma_rate, "iterations"_a, "threads"_a);
}
