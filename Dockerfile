# docker build -t octavo . && docker run --rm -p 127.0.0.1:8000:8000 -v octavo-models:/models -e OCTAVO_API_KEY=... octavo
FROM python:3.12-slim AS build
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY CMakeLists.txt LICENSE README.md pyproject.toml ./
COPY csrc csrc
COPY src src
RUN pip wheel -q --no-deps -w /dist .

FROM python:3.12-slim
COPY --from=build /dist /dist
RUN pip install -q --no-cache-dir --only-binary :all: "$(ls /dist/*.whl)[server]" && rm -r /dist && \
    useradd --create-home octavo && mkdir /models && chown octavo /models
USER octavo
ENV XDG_CACHE_HOME=/models
VOLUME /models
EXPOSE 8000
HEALTHCHECK --interval=30s --start-period=120s CMD ["python", "-c", \
    "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["octavo", "serve", "--host", "0.0.0.0"]
CMD ["smollm2-135m"]
